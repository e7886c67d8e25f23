import webbrowser

import pytest
import typer
from typer.testing import CliRunner

from compressm.cli.report import report
from compressm.reports import run_report
from tests.reports.made_runs import Made, without, write


@pytest.fixture
def app():
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(report)
    return app


def run(app, *arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def plain(done):
    return " ".join(done.output.replace("│", " ").split())


def test_a_report_is_written_and_its_path_printed(app, tmp_path):
    folder = write(Made(order=4, every=2500, spectra=False), tmp_path / "runs")
    done = run(app, folder, "--out", tmp_path / "out", "--title", "My <runs>", "--formats", "svg")
    assert done.exit_code == 0, done.output
    page = tmp_path / "out" / "report.html"
    assert f"report: {page}" in done.output
    assert "<title>My &lt;runs&gt;</title>" in page.read_text()
    assert {path.suffix for path in (tmp_path / "out" / "figures").iterdir()} == {".svg"}


def test_a_page_is_opened_only_when_asked_for(app, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(run_report, "write_report", lambda runs, out, **options: out / "report.html")
    folder = write(Made(order=4, every=5000, spectra=False), tmp_path / "runs")
    assert run(app, folder, "--out", tmp_path / "out").exit_code == 0
    assert opened == []
    run(app, folder, "--out", tmp_path / "out", "--open")
    assert opened == [(tmp_path / "out" / "report.html").as_uri()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere does not exist, expected the folder of a run or of several"),
        (["docs"], "docs holds no run"),
        (["docs", "--formats", "png,bmp"], "'bmp', expected some of png, pdf, svg"),
        (["docs", "--formats", ","], "',', expected some of png, pdf, svg"),
        (["docs", "--out", "/proc/nope"], "/proc/nope"),
    ],
)
def test_a_bad_value_says_what_was_given_and_exits_2(app, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    done = run(app, *arguments)
    assert done.exit_code == 2
    assert said in plain(done)


@pytest.mark.parametrize("name", ["metrics.jsonl", "spectra.jsonl"])
def test_a_broken_line_is_named_and_nothing_is_written(app, tmp_path, name):
    folder = write(Made(order=4, every=5000), tmp_path)
    (folder / name).write_text("{}\n")
    done = run(app, folder, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert f"{name}, line 1" in plain(done).replace(" ", "").replace(",line1", ", line 1")
    assert not (tmp_path / "out" / "report.html").exists()


def test_a_recipe_without_a_name_is_refused(app, tmp_path):
    folder = without(write(Made(order=4, every=5000), tmp_path), "name")
    done = run(app, folder, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "name is None, expected str" in plain(done)

import shutil
import webbrowser
from html import unescape

import pytest
import typer
from typer.testing import CliRunner

from compressm_lab.cli.report import report
from compressm_lab.reports import run_report
from compressm_lab.runs.directory import find_runs
from compressm_lab.runs.groups import gather
from tests.lab.reports.made_runs import Made, without, write


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
        (["docs", "--formats", "pgn"], "'pgn', expected some of png, pdf, svg; did you mean 'png'?"),
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


@pytest.mark.parametrize("name", ["metrics.jsonl", "spectra.jsonl", "penalties.jsonl"])
def test_a_broken_line_is_named_and_nothing_is_written(app, tmp_path, name):
    folder = write(Made(order=4, every=5000), tmp_path)
    (folder / name).write_text("{}\n")
    done = run(app, folder, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert f"{name}, line 1" in plain(done).replace(" ", "").replace(",line1", ", line 1")
    assert not (tmp_path / "out").exists()


BROKEN = {
    "config.json": "{",
    "status.json": '{"state": "finished", "step": "many", "steps": 5, "message": ""}',
    "metrics.jsonl": '{"step": 1, "split": "test", "loss": "low", "accuracy": null, "learning_rate": 0, '
    '"seconds": 0, "step_seconds": 0}\n',
    "spectra.jsonl": '{"step": 1, "module": "blocks.0.ssm", "sigma": ["large"], "weyl_bound": null}\n',
    "timings.jsonl": b"\xff\n",
    "penalties.jsonl": '{"step": 1, "kind": "modal-l1", "value": "low", "beta": 0.1, "found_at": 1, "evaluations": 1, '
    '"seconds": 0.1}\n',
    "truncations.jsonl": '{"step": 1}\n',
}


def test_broken_runs_are_named_and_the_others_are_reported(app, tmp_path, monkeypatch):
    # Pictures have tests of their own.
    monkeypatch.setattr(run_report, "write_files", lambda *_: [])
    monkeypatch.setattr(run_report, "inline_svg", lambda *_, **__: "")
    write(Made(order=4, every=5000), tmp_path / "runs")
    broken = []
    for seed, (name, spoil) in enumerate(BROKEN.items(), 1):
        # A group shows its best seed, which has to be the one with broken spectra for them to be read.
        best = 0.99 if name == "spectra.jsonl" else 0.97
        broken.append(write(Made(order=4, every=5000, seed=seed, best=best), tmp_path / "runs") / name)
        broken[-1].write_bytes(spoil if isinstance(spoil, bytes) else spoil.encode())
    (tmp_path / "docs").mkdir()
    done = run(
        app, tmp_path / "runs", tmp_path / "docs", tmp_path / "gone", "--out", tmp_path / "out", "--formats", "png"
    )
    assert done.exit_code == 0, done.output
    page = unescape((tmp_path / "out" / "report.html").read_text())
    for said in (*map(str, broken), f"{tmp_path / 'docs'} holds no run", f"{tmp_path / 'gone'} does not exist"):
        assert f"warning: left out: {said}" in done.stderr
        assert f"Left out: {said}" in page
    assert "smnist (1 run in 1 group)" in page


def test_where_no_run_can_be_read_each_is_named(app, tmp_path):
    for seed in range(2):
        (write(Made(order=4, every=5000, seed=seed), tmp_path / "runs") / "status.json").write_text("{}")
    done = run(app, tmp_path / "runs", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert plain(done).replace(" ", "").count("status.jsonholds{}") == 2
    assert not (tmp_path / "out").exists()


def test_a_recipe_without_a_name_is_refused(app, tmp_path):
    folder = without(write(Made(order=4, every=5000), tmp_path), "name")
    done = run(app, folder, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "name is None, expected str" in plain(done)


@pytest.mark.parametrize("way", ["absolute", "dots", "link"])
def test_a_folder_that_is_named_twice_counts_once(tmp_path, monkeypatch, way):
    folder = write(Made(order=4, every=5000), tmp_path / "runs")
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    monkeypatch.chdir(folder.parent)
    other = {"absolute": folder, "dots": f"{folder.name}/../{folder.name}", "link": tmp_path / "link"}[way]
    found = gather([folder.name, other])
    assert (len(found.runs), found.broken) == (1, ())
    assert len(find_runs([folder.name, other])) == 1


def test_a_copy_of_a_run_is_not_another_seed(tmp_path):
    folder = write(Made(order=4, every=5000), tmp_path / "runs")
    stopped = tmp_path / "a copy"
    shutil.copytree(folder, stopped)
    (stopped / "status.json").write_text('{"state": "interrupted", "step": 10000, "steps": 10000, "message": ""}')
    for paths in ([folder, stopped], [stopped, folder]):
        found = gather(paths)
        assert [run.path for run in found.runs] == [str(folder)]
        said = f"{stopped} is a run of the same recipe and seed (0) as {folder}: a seed counts once"
        assert found.broken == (said,)

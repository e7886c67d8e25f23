"""The walk through a spectrum: what its slider says and shows at each place."""

from compressm_lab.reports.panels import inline_svg
from compressm_lab.reports.walk_chart import walk_chart
from compressm_lab.runs.groups import group_runs
from tests.lab.reports import made_runs
from tests.lab.reports.conftest import read
from tests.lab.reports.made_runs import Made


def test_the_words_of_a_walk_follow_the_orders_of_the_run(shallow):
    group = shallow[-1]
    run, chart = group.shown, walk_chart(group, "#0072B2")
    assert chart.moments[0] == "step 0: 24 states"
    assert chart.moments[-1].endswith(f": {run.mean_order:g} states")
    said = {words.split(":")[0]: words for words in chart.moments}
    for cut in run.cut_records:
        now = said[f"step {cut.step:,}".replace(",", "\u202f")]
        assert now.endswith(f": {cut.order} states, cut to {cut.rank} states here")


def test_every_place_of_the_slider_has_a_line_and_every_cut_a_dotted_rest(shallow):
    group = shallow[-1]
    chart = walk_chart(group, "#0072B2")
    drawn = inline_svg(chart.panels[0], key="walk-0", size=chart.size)
    for k, words in enumerate(chart.moments):
        assert f'id="walk-0-moment-{k}"' in drawn
        assert (f'id="walk-0-moment-{k}-cut"' in drawn) == ("cut to" in words)


def test_all_layers_walk_together(tmp_path):
    made_runs.write(Made("scifar", depth=3, order=12, cuts=((1000, 0.7),), every=500), tmp_path)
    (group,) = group_runs(read(tmp_path))
    chart = walk_chart(group, "#0072B2")
    assert [panel.title for panel in chart.panels] == [f"blocks.{k}: σ of every state" for k in range(3)]
    (cut,) = [words for words in chart.moments if "cut to" in words]
    assert cut.startswith("step 1\u202f000: 12 states, cut to ")
    assert cut.endswith("states a layer here")


def test_there_is_nothing_to_walk_through_without_spectra(odd):
    assert walk_chart(odd["broken", "going on"], "#0072B2") is None

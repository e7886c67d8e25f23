"""The study of LinOSS, S4 and a bilinear system: a small version, and what its page says of the committed result."""

from statistics import fmean

import pytest

from compressm_lab.runs.measurement import Measurement
from lti_newcomers import measure_lti_newcomers
from tests.docs.measured import ROOT

RESULT = Measurement.read(ROOT / "benchmarks" / "results" / "lti_newcomers.json")


def error(setting, way, rank):
    rows = [row for row in RESULT.rows if (row["setting"], row["way"], row["rank"]) == (setting, way, rank)]
    assert len(rows) == RESULT.repeats >= 3
    return fmean(float(row["error"]) for row in rows)


def test_a_small_version_has_every_way_at_every_order():
    rows = measure_lti_newcomers(seeds=1, quick=True).rows
    assert {(row["setting"], row["way"]) for row in rows} == {(row["setting"], row["way"]) for row in RESULT.rows}
    assert {row["rank"] for row in rows} == {8, 4}
    assert all(0 < float(row["error"]) < 2 for row in rows)


@pytest.mark.parametrize(("rank", "times"), [(16, 1.2), (8, 1.1)])
def test_oscillators_on_the_circle_lose_hardly_more_than_balanced_truncation(rank, times):
    free, kept, circle, modal = (
        error("LinOSS, implicit", way, rank)
        for way in ("balanced truncation, any poles", "as the layer stores it", "on the circle, C as it was", "modal")
    )
    assert free < kept < times * free
    assert kept < circle < modal


def test_damped_oscillators_lose_nothing_more():
    for rank in (32, 16, 8):
        free, kept = (
            error("LinOSS, damped", way, rank) for way in ("balanced truncation, any poles", "as the layer stores it")
        )
        assert kept == pytest.approx(free, rel=1e-9)


def test_with_p_measured_on_slow_inputs_the_error_of_s4_is_a_tenth():
    for rank in (32, 16, 8):
        ways = ("P measured on slow inputs", "white-noise P, slow inputs")
        measured, white = (error("S4 as it starts", way, rank) for way in ways)
        assert measured < 0.15 * white


def test_measured_p_of_a_bilinear_system_is_at_least_as_good_as_that_of_its_linear_part():
    for rank in (32, 16, 8):
        measured, linear = (error("a bilinear system", way, rank) for way in ("measured P", "P of the linear part"))
        assert measured < 1.01 * linear

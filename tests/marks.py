"""Which of many cases run in every suite, and which only in the slow one."""

import pytest


def later(values, *now):
    """The values; those that are not named `now` run where there is time."""
    values = list(values)
    assert set(now) <= set(values)
    return [value if value in now else _slow(value) for value in values]


def every_other(values):
    """Half of them run where there is time."""
    return [_slow(value) if k % 2 else value for k, value in enumerate(values)]


def _slow(value):
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

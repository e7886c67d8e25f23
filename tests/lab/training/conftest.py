import pytest


@pytest.fixture(autouse=True)
def _commit(monkeypatch):
    """Asking git for it takes longer than training."""
    monkeypatch.setenv("COMPRESSM_COMMIT", "tests")

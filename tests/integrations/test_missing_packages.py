"""Without its package an integration says which extra installs it; importing compressm loads none of them."""

import pytest

from tests import unhooked

SCRIPT = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {absent!r} else found(name, *rest)
try:
    import compressm.integrations.{module}
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("module", "absent", "extra"),
    [
        ("transformers_trainer", "transformers", "trainer"),
        ("transformers_trainer", "accelerate", "trainer"),
        ("lightning", "lightning", "lightning"),
        ("accelerate", "accelerate", "accelerate"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(module, absent, extra):
    said = unhooked.run(SCRIPT.format(absent=absent, module=module))
    assert said.startswith(f"{absent} is not installed")
    assert f"pip install 'compressm[{extra}]'" in said

"""verify is green on a model of transformers."""

from typing import Any

import pytest
from hf_models import CONFIGS, override
from test_hf_updates import text
from test_verify import verified

pytestmark = pytest.mark.slow


def test_verify_is_green(ranks: Any) -> None:
    (cells, *_) = ranks.run(verified, text(override(CONFIGS["llama tied"])), None, (), world_size=2, timeout=200)
    assert [(one.strategy, one.reason) for one in cells if not one.passed] == []
    assert {"ddp", "fsdp", "zero1", "zero2", "zero3"} <= {one.strategy for one in cells}

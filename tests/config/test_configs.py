"""The quick way to a configuration for tests gives what a user's command would."""

import pytest
from configs import PLAIN, composed_text, config_text, own

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [*PLAIN, "strategy=fsdp", "strategy.wrap=[]", "mesh.dp_replicate=2", "precision=bf16"],
        ["optimizer=adamw", "optimizer.groups=[{match: norms_and_biases, lr_scale: 0.5}]", "~optimizer.betas"],
        ["data.validation={_target_: toys.Sequences, count: 5}", "data=custom", "data.train._target_=toys.Sequences"],
        [*own("a.Model", "a.Task", "a.Data", values=[0.5, -1.0]), "+model.how='one tuple'", "data.validation=null"],
        ["schedule/decay=wsd", "strategy=zero3", "+strategy.deepspeed.zero_optimization.reduce_bucket_size=1"],
        ["+model.note='${run.name}-${oc.env:HOME}'", "run.seed=3", "++run.name=mine", "batch.global_batch_size=null"],
    ],
    ids=lambda overrides: " ".join(overrides)[:30] or "none",
)
def test_values_set_on_a_copy_are_those_of_a_command(overrides: list[str]) -> None:
    assert config_text(*overrides) == composed_text(*overrides)
    assert config_text(*overrides) == composed_text(*overrides), "what is kept stays as it was"

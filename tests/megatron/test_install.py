"""`install` and `uninstall`, and the models that are refused with the flag to change."""

from __future__ import annotations

from tests.megatron import launch, needs

needs.megatron()


def test_what_is_replaced_is_put_back() -> None:
    [found] = launch.on_ranks(1, "install_cases", "replaced")
    assert found == {
        "before": [],
        "install()": [
            "wrap_model_chunks_with_ddp",
            "get_megatron_optimizer",
            "clip_qk",
            "_ddp_wrap",
        ],
        "install(ddp=False)": ["get_megatron_optimizer", "clip_qk"],
        "uninstall()": [],
    }


def test_the_signature_is_megatrons() -> None:
    [(ours, theirs)] = launch.on_ranks(1, "install_cases", "signatures")
    assert ours == theirs
    assert "config_overrides=None" in ours


def test_models_that_cannot_be_adopted_are_refused_with_the_flag_to_change() -> None:
    [found] = launch.on_ranks(1, "install_cases", "refused")
    flags = {
        "wrapped by another": "call install() before the model is built",
        "nothing": "model_chunks is empty",
        "FSDP": "--use-megatron-fsdp",
        "FSDP of the builder": "--use-torch-fsdp2",
        "conditional embedder": "has_cond_embedder=True",
        "no global names": "has no sharded_state_dict; derive it from MegatronModule",
        "a name left out": "'bias' is not in the model's sharded_state_dict",
        "a name twice": "'weight' and 'bias' both have the key 'same'",
        "divided again": "--gtp-weight-remat-size",
        "adopted, not wrapped": "drop --use-megatron-fsdp",
    }
    assert {name: text for name, text in found.items() if flags[name] not in text} == {}
    assert found.keys() == flags.keys()

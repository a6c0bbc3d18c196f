from tools.spec.run import DeviceKind, spec_of_flags, spec_of_printed

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
LOCAL = [*SHAPE.split(), "--transformer-impl", "local"]


def test_without_transformer_engine_a_gpu_attends_on_sdpa_and_a_cpu_rank_keeps_scores() -> None:
    assert spec_of_flags(LOCAL, 1, DeviceKind.GPU).fused_attention
    assert not spec_of_flags(LOCAL, 1, DeviceKind.CPU).fused_attention


def test_a_foreign_log_with_megatrons_own_layers_keeps_scores() -> None:
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    printed = dict(zip(names, ("2", "64", "4", "64"), strict=True))
    for implementation, fused in (("local", False), ("transformer_engine", True)):
        spec = spec_of_printed(printed | {"transformer_impl": implementation})
        assert spec is not None
        assert spec.fused_attention is fused

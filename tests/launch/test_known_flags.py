"""The flag table against the parser of the Megatron that is installed."""

from parakit.config.flag_table import FLAGS, FLAGS_WITHOUT_ROW
from tests.launch.megatron_parser import MegatronParser

OPPOSITES = (
    *("--untie-embeddings-and-output-weights", "--no-persist-layer-norm"),
    *("--no-load-optim", "--no-load-rng"),
)
"""The parser keeps these under their own name, the opposite of what the table calls by its field."""
DERIVED = ("--dataloader-type",)
"""Without a default in the parser; Megatron sets it behind."""


def test_every_flag_of_the_parser_is_known_by_name(megatron_parser: MegatronParser) -> None:
    assert megatron_parser.flags().keys() - {*FLAGS, *FLAGS_WITHOUT_ROW} == {"-h", "--help"}


def test_the_table_is_megatrons_parser(megatron_parser: MegatronParser) -> None:
    parsed = megatron_parser.flags()
    for name, flag in FLAGS.items():
        if flag.role == "kit" or flag.until:
            assert name not in parsed
            continue
        kind, default = parsed[name]
        if name in OPPOSITES:
            assert (flag.kind, flag.default, kind, bool(default)) == ("off", True, "on", False)
            continue
        parser_kind = {"texts": "text", "backend": "text", "numbers": "whole"}.get(
            flag.kind, flag.kind
        )
        assert kind == parser_kind or name == "--moe-layer-freq", (
            name
        )  # A number, or a list of Python's.
        usual = (default, str(default).removeprefix("AttnBackend."))
        nothing = not flag.default and not default
        assert nothing or flag.default in usual or str(flag.default) in usual or name in DERIVED, (
            name
        )

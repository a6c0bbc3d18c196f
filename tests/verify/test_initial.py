import hashlib

import msgspec
import numpy as np
import pytest

from parakit.artifacts.capture import INITIAL, INITIAL_FILE, InitialPiece
from parakit.artifacts.verdict import VerifyOutcome
from parakit.verify.initial import find_wrong_initializations
from parakit.verify.verdict import judge
from tests.verify.captures import MODULE, WEIGHT, output, place, random, rank, write

WHOLE = random(64, 3)


def begun(folder, *ranks):
    """A capture whose ranks have initialised (offset, values) of one weight; outputs are all alike."""
    capture = write(
        folder,
        [
            (rank(number, world_size=len(ranks), tensor=(number, len(ranks))), [OUTPUT])
            for number in range(len(ranks))
        ],
    )
    for captured_rank, held in zip(capture.ranks, ranks, strict=True):
        pieces = [
            InitialPiece(
                WEIGHT,
                place((0, offset, 0), (1, 64, 3)),
                values.shape,
                hashlib.sha256(values.tobytes()).hexdigest(),
                float(values.mean()),
                float(values.std()),
            )
            for offset, values in held
        ]
        (captured_rank.folder / INITIAL_FILE).write_bytes(msgspec.json.encode(pieces))
    return capture


OUTPUT = (output(MODULE), np.ones((8, 2, 6), np.float32))


@pytest.mark.parametrize(
    ("ranks", "kind", "wrong"),
    [
        (([(0, WHOLE[:32])], [(32, random(32, 3, seed=1))]), "", ()),
        (
            ([(0, WHOLE[:32])], [(32, WHOLE[:32])]),
            "initialised as a copy of the part of rank 0",
            (1,),
        ),
        (
            ([(0, WHOLE)], [(0, random(64, 3, seed=1))]),
            "copies are initialised otherwise on each of the ranks",
            (0, 1),
        ),
        (
            ([(0, WHOLE[:32])], [(32, 2 * random(32, 3, seed=1))]),
            "initialised with a standard deviation of ",
            (1,),
        ),
        (
            ([(0, WHOLE[:32])], [(32, 3 + random(32, 3, seed=1))]),
            "initialised with a mean of 2.94, not 0.0126",
            (1,),
        ),
        # What is constant is alike everywhere.
        (([(0, 0 * WHOLE[:32])], [(32, 0 * WHOLE[:32])]), "standard deviation of 0, not", (0, 1)),
    ],
)
def test_wrong_initialization_of_a_layout_is_named(tmp_path, ranks, kind, wrong):
    reference, strategy = begun(tmp_path / "one", [(0, WHOLE)]), begun(tmp_path / "two", *ranks)
    wrong_initializations = [*find_wrong_initializations(reference, strategy)]
    assert [comparison for comparison in wrong_initializations if kind not in comparison.kind] == []
    assert {number for comparison in wrong_initializations for number in comparison.ranks} == {
        *wrong
    }


def test_equal_constants_of_two_shards_are_right(tmp_path):
    ones = np.ones((64, 3), np.float32)
    reference = begun(tmp_path / "one", [(0, ones)])
    assert not [
        *find_wrong_initializations(
            reference, begun(tmp_path / "two", [(0, ones[:32])], [(32, ones[32:])])
        )
    ]


def test_wrong_initialization_is_named_although_every_tensor_holds(tmp_path):
    reference = begun(tmp_path / "one", [(0, WHOLE)])
    judgement = judge(reference, begun(tmp_path / "two", [(0, WHOLE[:32])], [(32, WHOLE[:32])]))
    verdict = judgement.verdict
    assert (verdict.verdict, verdict.module, verdict.tensor) == (
        VerifyOutcome.DIFFERS,
        WEIGHT,
        INITIAL,
    )
    assert (verdict.kind, verdict.ranks, verdict.iteration, verdict.initialised) == (
        "initialised as a copy of the part of rank 0",
        (1,),
        0,
        2,
    )


def test_run_without_captured_initialization_is_not_checked(tmp_path):
    reference, strategy = (write(tmp_path / name, [(rank(), [OUTPUT])]) for name in ("one", "two"))
    assert judge(reference, strategy).verdict.initialised is None

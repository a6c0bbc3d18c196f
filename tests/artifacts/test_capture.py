import json

import msgspec

from parakit.artifacts.capture import CaptureStage, TensorKey, TensorRecord


def test_index_of_a_capture_keeps_its_stored_keys() -> None:
    key = TensorKey(CaptureStage.OUTPUTS, "decoder.layers.0.mlp", "output", micro_batch=0)
    record = TensorRecord(key, "float32", (2, 3), offset_bytes=0, size_bytes=24)
    stored = msgspec.json.encode(record)
    assert json.loads(stored)["site"]["name"] == "decoder.layers.0.mlp"
    assert msgspec.json.decode(stored, type=TensorRecord) == record

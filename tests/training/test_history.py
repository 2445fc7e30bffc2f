import json
from dataclasses import asdict

from hyperion.checkpoints import read_state, write_state
from hyperion.training import EpochRecord, History

RECORD = EpochRecord(1, 10, 10, 2.5, 1e-3, 640, 0.5, 7, 900.0, "peak_rss_gib", None, {"loss": 2.0})


def test_a_history_survives_a_file_bit_for_bit(tmp_path):
    history = History("token", [0.1, 1 / 3, 2e-30], [RECORD], [4])
    write_state(tmp_path, history.state_dict())
    assert History.from_state_dict(read_state(tmp_path)) == history


def test_a_record_is_json():
    assert EpochRecord(**json.loads(json.dumps(asdict(RECORD)))) == RECORD

import numpy as np
import pytest
import torch

from tests.fakes.graphs import FakeCapture
from worker.compile.graphs import Input, Stage, StaleGraph, fill

CPU = torch.device("cpu")


def layout(bucket):
    return {
        "rows": Input((bucket,), torch.int64),
        "draws": Input((bucket, 3), torch.float64),
        "is_on": Input((bucket,), torch.bool),
        "given": Input((bucket, 2), torch.float32, is_from_host=False),
    }


def make_stage(cache):
    def function(bucket, inputs):
        cache[0].index_add_(0, inputs["rows"], inputs["given"])
        return (inputs["draws"].sum(1).float(), torch.where(inputs["is_on"], inputs["rows"], -1))

    return Stage("test", layout, function, (1, 2), CPU, [lambda: cache[0]])


def run(stage, rows, value):
    call = stage.at(len(rows))
    host = call.begin()
    fill(host["rows"], rows)
    host["draws"][:] = value
    host["is_on"][:] = [True, False][: len(rows)]
    call.tensors["given"].fill_(value)
    return call.run()


@pytest.mark.parametrize("captured", [False, True])
def test_a_run_sees_exactly_what_was_filled_in(captured):
    cache = [torch.zeros(4, 2)]
    stage = make_stage(cache)
    if captured:
        for bucket in stage.buckets:
            stage.at(bucket).capture(FakeCapture())
        cache[0].zero_()

    sums, chosen = run(stage, (3, 1), 2.0)

    assert sums.tolist() == [6.0, 6.0]
    assert chosen.tolist() == [3, -1]
    assert cache[0][:, 0].tolist() == [0.0, 2.0, 0.0, 2.0]


def test_outputs_of_a_graph_stay_in_place_and_are_overwritten_by_the_next_run():
    stage = make_stage([torch.zeros(4, 2)])
    stage.at(1).capture(FakeCapture())

    first, _ = run(stage, (0,), 1.0)
    second, _ = run(stage, (0,), 5.0)

    assert first is second
    assert first.tolist() == [15.0]


def test_runs_replays_and_captures_are_counted():
    stage = make_stage([torch.zeros(4, 2)])
    run(stage, (0,), 1.0)
    stage.at(1).capture(FakeCapture())
    run(stage, (0,), 1.0)
    stage.at(1).again()
    run(stage, (0, 1), 1.0)  # was not captured

    counts = stage.counts
    assert (counts.runs, counts.replays, counts.captures) == (4, 2, 1)


def test_again_runs_on_the_inputs_that_are_there():
    cache = [torch.zeros(4, 2)]
    stage = make_stage(cache)
    run(stage, (2,), 3.0)

    stage.at(1).again()

    assert cache[0][2].tolist() == [6.0, 6.0]


def test_a_graph_is_not_replayed_when_memory_has_moved():
    cache = [torch.zeros(4, 2)]
    stage = make_stage(cache)
    stage.at(1).capture(FakeCapture())
    run(stage, (0,), 1.0)
    old, cache[0] = cache[0], torch.zeros(8, 2)

    with pytest.raises(StaleGraph, match="test 1"):
        run(stage, (0,), 1.0)
    stage.at(1).capture(FakeCapture())
    run(stage, (0,), 1.0)

    assert old[0, 0] != 0
    assert cache[0][0, 0] == 2.0  # captured, run


def test_every_run_tells_its_shape():
    seen = []
    stage = make_stage([torch.zeros(4, 2)])
    stage.on_shape = lambda name, bucket: seen.append((name, bucket))
    run(stage, (0, 1), 1.0)

    assert seen == [("test", 2)]


def test_inputs_lie_apart_and_aligned():
    stage = make_stage([torch.zeros(4, 2)])
    call = stage.at(2)
    host = call.begin()
    for number, array in enumerate(host.values(), 1):
        array[...] = number

    assert [array.ravel()[0] for array in host.values()] == [1, 2, True]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in call.tensors.values())


def test_fill_pads():
    array = np.full(4, 7)
    fill(array, [1, 2], 9)

    assert array.tolist() == [1, 2, 9, 9]

"""A failure here is an error of the reducer that comes too late, or does not say what and where."""

import pytest
from engine_examples import Layers, backward, data_of, plan_of, reducer_of
from torch import Tensor, nn

from lightning_mgwfbp.exchange.transport import LoopbackTransport, Pending
from lightning_mgwfbp.plan import MergePlan


class _Lost:
    def wait(self) -> None:
        raise RuntimeError("connection reset")


@pytest.mark.parametrize("at", ["start", "wait"])
def test_a_failed_exchange_names_the_merge_group(at: str) -> None:
    """An error that does not say what was pending, whether it comes at once or later."""
    transport = LoopbackTransport.solo()
    model = Layers()
    reducer = reducer_of(model, transport, 2, 3, 1)
    start = transport.all_reduce

    def failing(buffer: Tensor, *, key: str) -> Pending:
        if key == "bucket 1":
            if at == "start":
                raise RuntimeError("connection reset")
            return _Lost()
        return start(buffer, key=key)

    transport.all_reduce = failing  # type: ignore[method-assign]
    backward(model, data_of(0))
    named = r"Rank 0: .*merge group 1 of 3 \(layers.1.bias to layers.0.bias\).*connection reset"
    with pytest.raises(RuntimeError, match=named):
        reducer.synchronize()
    reducer.close()  # and what is still on its way does not keep it from closing


def test_a_model_without_trainable_parameters_is_refused() -> None:
    """The error comes later, from somewhere that does not know why."""
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        reducer_of(model, LoopbackTransport.solo())


def test_a_plan_for_other_parameters_is_refused() -> None:
    """A foreign plan is installed, and its parameters are never found."""
    model = Layers()
    reducer = reducer_of(model, LoopbackTransport.solo())
    foreign = MergePlan((*plan_of(model, 6).names[:-1], "stranger"), ((0, 6),))
    with pytest.raises(ValueError, match=r"layers\.0\.weight"):
        reducer.install(foreign)
    assert reducer.plan.names == plan_of(model, 6).names

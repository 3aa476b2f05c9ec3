"""`ExchangingStrategy`: what Lightning calls, in a strategy that exchanges gradients itself.

The model is not wrapped, so that checkpoints, hooks and callbacks see what they see without a
strategy; what DistributedDataParallel does around a forward and a backward is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgwfbp.attendance import Attendance
from lightning_mgwfbp.callbacks import WarmupCallback
from lightning_mgwfbp.engine.agreement import require_agreement, version_facts
from lightning_mgwfbp.engine.averaged_step import AveragedStep
from lightning_mgwfbp.engine.deferred_step import DeferredStep
from lightning_mgwfbp.engine.errors import explain
from lightning_mgwfbp.engine.options import Options
from lightning_mgwfbp.engine.session import Session
from lightning_mgwfbp.engine.warmup import Tuned
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.fit_session import open_session
from lightning_mgwfbp.joined_ranks import JoinedRanks, JoinOptions
from lightning_mgwfbp.kept_state import KeptState, load_everywhere
from lightning_mgwfbp.preemption import Preemption
from lightning_mgwfbp.trainer_facts import model_facts, require_exchangeable_model
from lightning_mgwfbp.uneven_inputs import UnevenInputs, require_joinable


class ExchangingStrategy(DDPStrategy):
    """DDPStrategy without DistributedDataParallel.

    Args:
        options: what the user chose of the exchange.
        join: and of how ranks are joined.
        ddp_arguments: DDPStrategy's own.

    Attributes:
        session, preemption: while fitting on several ranks.
        tuned: the last plan, with what it was made from.
        measured_exposed_seconds: see `Reducer.exposed_seconds`; of the last fit.
    """

    strategy_name = "mgwfbp"

    def __init__(self, options: Options, join: JoinOptions, **ddp_arguments: Any) -> None:
        super().__init__(timeout=join.timeout, **ddp_arguments)
        self._options = options
        self._join = join
        self._joined: JoinedRanks | None = None  # on several ranks
        self._attendance = Attendance(join.limit)
        self._steps: dict[int, AveragedStep | DeferredStep] = {}
        self._kept = KeptState()
        self._explained: BaseException | None = None
        self.session: Session | None = None
        self.preemption: Preemption | None = None
        self.tuned: Tuned | None = None
        self.measured_exposed_seconds: float | None = None

    @property
    def inputs(self) -> UnevenInputs | None:
        """Which ranks have batches; None in one process."""
        return None if self._joined is None else self._joined.inputs

    @override
    def configure_ddp(self) -> None:
        """Takes the place of the wrapping in DDP: the ranks compare, then rank 0's state wins."""
        if self.world_size == 1:
            rank_zero_info(f"strategy {self.strategy_name!r}: one process, nothing to exchange.")
            return
        module = self.lightning_module
        assert module is not None
        facts = {**version_facts(), **self._options.facts(), **self._join.facts()}
        with_buffers = self._join.exchanges_buffers
        facts |= model_facts(module, with_buffers=with_buffers)
        # over Lightning's own group: who disagrees on the transport opens another one, or none
        require_agreement(TorchTransport.world(), facts)
        require_exchangeable_model(module, with_buffers=with_buffers)
        self._joined = JoinedRanks(module, self._join)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._kept.forget()
        self._attendance = Attendance(self._join.limit)
        callback = WarmupCallback.of(trainer)
        callback.attach(self)
        if self._joined is None:
            return  # one process
        if self._join.uneven_inputs == "join":
            require_joinable(trainer, self._joined.transport)
        refresher = self._joined.buffers
        buffers = None if refresher is None else refresher.buffers
        self.session = open_session(trainer, self._joined.transport, self._options, buffers)
        roll_call = self.session.roll_call
        self.preemption = None if roll_call is None else Preemption(trainer, roll_call)
        self._steps = self.session.steps_of(self.optimizers, super().optimizer_step)
        callback.session_begins()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        session, joined = self.session, self._joined
        if session is None or joined is None:
            return super().training_step(*args, **kwargs)
        self._attendance.batch_begins()
        inputs, buffers = joined.inputs, joined.buffers
        if buffers is not None:
            buffers.before_forward(goes_stale=session.reducer.syncing)
        output: STEP_OUTPUT
        with session.forward(), inputs.training_step():
            if inputs.stands_by:
                output = inputs.zero_loss()
            else:
                output = super().training_step(*args, **kwargs)
        if buffers is not None:
            buffers.after_forward(inputs.present[0])
        session.set_contributors(inputs.contributors)
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._joined is not None and self._joined.buffers is not None:
            self._joined.buffers.before_forward(goes_stale=False)
        return super().validation_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        # the base class's, with averages in place before `on_after_backward` runs
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        with nullcontext() if self.session is None else self.session.backward():
            plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        take_step = super().optimizer_step
        if self.session is None:
            return take_step(optimizer, closure, model, **kwargs)
        if id(optimizer) not in self._steps:  # put in the place of another one
            known = [each for each in self.optimizers if each is not optimizer]
            self._steps = self.session.steps_of([optimizer, *known], take_step)
        return self._steps[id(optimizer)](closure, model=model, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with nullcontext() if self.session is None else self.session.reducer.no_sync():
            yield

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return dataloader if self.inputs is None else self.inputs.evened(dataloader)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self.inputs is not None:
            self.inputs.require_outside("`self.log(..., sync_dist=True, on_step=True)`")
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self.inputs is not None:
            self.inputs.require_outside("`self.all_gather(...)`")
        return super().all_gather(tensor, group, sync_grads)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.session is not None:
            self.session.flush()  # also where the module's own state_dict() calls no hooks
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        self._kept.add_to(checkpoint, self.session)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Each rank reads; where one of several cannot, it is every rank's ValueError."""
        load = super().load_checkpoint
        if self.world_size == 1:
            return load(checkpoint_path, *args, **kwargs)
        return load_everywhere(lambda: load(checkpoint_path, *args, **kwargs), checkpoint_path)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._kept.take_up(checkpoint, self.session)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.explain(exception)

    def explain(self, exception: BaseException) -> None:
        """Say what other ranks have to do with it, or tell them of it; once.

        Called before other callbacks hear of it, which may wait for other ranks themselves. All
        ranks know of an end by SIGTERM.
        """
        if exception is not self._explained and not isinstance(exception, SIGTERMException):
            self._explained = exception
            explain(exception)

    @override
    def teardown(self) -> None:
        session, self.session = self.session, None
        joined, self._joined = self._joined, None
        self.preemption = self._explained = None
        self._steps.clear()
        with ExitStack() as ends:  # the last one first, and all of them
            ends.callback(super().teardown)
            if joined is not None:
                ends.callback(joined.close)
            if session is not None:
                ends.callback(session.close)
                self.measured_exposed_seconds = session.reducer.exposed_seconds
                self._kept.keep(session)

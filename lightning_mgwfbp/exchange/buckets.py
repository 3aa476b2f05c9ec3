"""`Bucket`: one flat buffer for the gradients of some parameters of one dtype and device.

[Note: gradients] What is handed out to be a parameter's `.grad` lies in the buffer's memory, but it
is no view: it has a version of its own, can be detached in place, and belongs to a storage of its
own size, so that saving it saves no more. Each parameter has a hidden template over such a storage,
of which a new tensor is made for each exchange. Somebody who still holds the last one, or anything
that shares its memory, keeps that storage in use; and whoever has given it to another process has
moved it. Then the bucket takes new memory, and what is held stays as it is.

Behind the gradients lies a tail of small numbers that travel in the same message: for each
parameter 1 where this rank has a gradient for it, and three more for what the ranks must agree on.
After the exchange a number above zero means "somewhere": the values are averaged, and narrow on the
wire, so nothing more can be read from them.

Complex gradients are kept as pairs of reals, so that every transport can sum them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

_FLAGS = 3  # behind those of the parameters: notice, again, not again
_LARGE_MEAN_NUMEL = 2**14


class Bucket:
    """Flat buffer, (sum of numels + number of parameters + 3,), and how gradients lie in it.

    Gradients get their parameter's own strides where those are dense (channels_last), else
    contiguous ones.

    Args:
        parameters: of one dtype and one device; those that may be compressed come first.
        names: theirs, for an exchanger that keeps something of each.
        compressed: how many of them may be.
    """

    def __init__(
        self, parameters: Sequence[Tensor], names: Sequence[str] = (), compressed: int = 0
    ) -> None:
        self.parameters = tuple(parameters)
        self.names = tuple(names)
        # as they are now: the user may put another tensor into a parameter's `.data`
        self.shapes = tuple(p.shape for p in self.parameters)
        self._strides = [_strides(p) for p in self.parameters]
        self.compressed = compressed
        sample = self.parameters[0]
        self._sizes = [p.numel() * (2 if p.is_complex() else 1) for p in self.parameters]
        self.body_numel = sum(self._sizes[:compressed])
        self._tail_numel = len(self.parameters) + _FLAGS
        self._numel = sum(self._sizes) + self._tail_numel
        self._dtype, self._device = sample.dtype, sample.device
        self._use_memory(self._numel)
        self._used: Sequence[bool] = ()
        self._complete = False
        self._share = 1.0

    @property
    def buffer(self) -> Tensor:
        """What is exchanged, (numel + tail,)."""
        return self._padded[: self._numel]

    @property
    def padded(self) -> Tensor:
        """The buffer, and behind it zeros, (numel + tail + padding,)."""
        return self._padded

    @property
    def data(self) -> Tensor:
        """The gradients, (numel,)."""
        return self._padded[: self._numel - self._tail_numel]

    @property
    def tail(self) -> Tensor:
        """What travels behind them, (number of parameters + 3,)."""
        return self._padded[self._numel - self._tail_numel : self._numel]

    @property
    def is_used_here(self) -> Sequence[bool]:
        """Which parameters this rank has a gradient for, as `pack` was told."""
        return self._used

    def pad(self, multiple: int) -> None:
        """Let `padded` have a multiple of so many numbers; what the buffer holds is lost."""
        numel = -(-self._numel // multiple) * multiple
        if numel != self._padded.numel():
            self._use_memory(numel)

    def chunks(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Cut `flat`, (numel,), into what belongs to each parameter, (its numel,) of reals."""
        return flat.split(self._sizes)

    def as_gradients(self, flat: Tensor) -> list[Tensor]:
        """Cut `flat`, (numel,), real of any precision, into views as gradients lie here."""
        chunks = zip(self.chunks(flat), self.shapes, self._strides, strict=True)
        if self._dtype.is_complex:
            return [torch.view_as_complex(chunk.view(*shape, 2)) for chunk, shape, _ in chunks]
        return [chunk.as_strided(shape, strides) for chunk, shape, strides in chunks]

    def pack(
        self,
        gradients: Sequence[Tensor | None],
        used: Sequence[bool],
        notice: bool = False,
        again: bool = False,
        *,
        share: float = 1.0,
    ) -> None:
        """Write each parameter's gradient, zeros for None, and the tail, all times `share`.

        Args:
            gradients: one for each parameter, of its shape and dtype.
            used: this rank's usage flag for each parameter.
            notice: whether this rank has something to say, see `noticed`.
            again: what all ranks must agree on.
            share: what the exchanger will want, as in `scale_to`; it is sooner done here.
        """
        if self._is_held():
            self._use_memory(self._padded.numel())
        tail = self.tail
        tail.fill_(share)
        for place, flag in enumerate((notice, again, not again), start=-_FLAGS):
            if not flag:
                tail[place] = 0
        self._used = used
        self._complete = all(used)
        if not self._complete:
            tail[:-_FLAGS] = torch.tensor(used, dtype=tail.dtype) * share
        self._share = share
        views, given = self._templates, [g for g in gradients if g is not None]
        if len(given) < len(gradients):
            pairs = list(zip(views, gradients, strict=True))
            torch._foreach_zero_([view for view, gradient in pairs if gradient is None])
            views = [view for view, gradient in pairs if gradient is not None]
        if given:
            if given[0].is_complex():
                given = [g.resolve_conj() for g in given]  # a lazy conjugate must not be sent
            self._write(views, given, share)

    def scale_to(self, share: float) -> None:
        """Have the buffer hold `share` times what was packed, if `pack` did not know it yet."""
        if share != self._share:
            self.buffer.mul_(share / self._share)
            self._share = share

    def gradients(self) -> list[Tensor]:
        """Hand out one tensor for each parameter, of its shape and dtype: [Note: gradients]."""
        if self._padded.data_ptr() != self._place:  # a communication hook has resized it
            self._make_templates()
        return [template.data for template in self._templates]

    def used(self) -> list[bool]:
        """Which parameters had a gradient on any rank. Waits for the device, unless this rank had
        all of them."""
        if self._complete:
            return [True] * len(self.parameters)
        flags: list[bool] = (self.tail[:-_FLAGS] > 0).tolist()
        return flags

    def noticed(self) -> bool | None:
        """Whether any rank set `notice`; None, on all ranks, if not all had the same `again`.
        Waits for the device."""
        notice, again, not_again = (self.tail[-_FLAGS:] > 0).tolist()
        return None if again and not_again else bool(notice)

    def _write(self, views: list[Tensor], given: list[Tensor], share: float) -> None:
        # A pass over memory less, but twice the time for each tensor. (Of complex numbers a product
        # is more than that of their parts.)
        in_one_pass = self._numel > _LARGE_MEAN_NUMEL * len(self.parameters)
        if share != 1 and in_one_pass and not given[0].is_complex():
            for view, gradient in zip(views, given, strict=True):
                torch.mul(gradient, share, out=view)
        else:
            torch._foreach_copy_(views, given)
            if share != 1:
                self.data.mul_(share)

    def _use_memory(self, padded_numel: int) -> None:
        """Take new memory, of so many numbers."""
        real = real_dtype(self._dtype)
        self._padded = torch.empty(padded_numel, dtype=real, device=self._device)
        self._padded[self._numel :].zero_()
        self._make_templates()

    def _make_templates(self) -> None:
        self._place, whole = self._padded.data_ptr(), self._padded.untyped_storage()
        ends = [n * self._padded.itemsize for n in accumulate(self._sizes, initial=0)]
        pieces = [whole[begin:end] for begin, end in pairwise(ends)]  # each keeps the whole alive
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        self._templates = [
            like.new_empty(0).set_(piece, 0, shape, strides)
            for piece, shape, strides in zip(pieces, self.shapes, self._strides, strict=True)
        ]
        self._pieces = [template.untyped_storage() for template in self._templates]
        self._places = [piece.data_ptr() for piece in self._pieces]
        del whole, pieces  # which must not be counted
        self._uses_unheld = self._uses()

    def _is_held(self) -> bool:
        """Whether somebody else holds the memory, or has moved it: [Note: gradients]."""
        places = [piece.data_ptr() for piece in self._pieces]
        return self._uses() != self._uses_unheld or places != self._places

    def _uses(self) -> list[int]:
        """How many hold the memory, and each piece of it."""
        count = torch._C._storage_Use_Count
        whole = count(self._padded.untyped_storage()._cdata)
        return [whole, *(count(piece._cdata) for piece in self._pieces)]


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of `dtype` lie in a bucket: complex ones as pairs of reals."""
    return dtype.to_real() if dtype.is_complex else dtype


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which residuals of gradients of `dtype` are added up: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Those of the gradient: the parameter's own where its elements lie side by side."""
    if parameter.is_complex() or not _is_dense(parameter):
        return torch.empty(parameter.shape, device="meta").stride()
    return parameter.stride()


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their storage without holes or overlap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True

"""Storage of a simulation's tensors: on a GPU always at the same addresses.

A recorded round reads and writes fixed addresses, so that new values must be copied into the
tensors that are there.
"""

from __future__ import annotations

import torch

from polyphily.core.messages import Message


def detached_from(new: Message, old: Message) -> Message:
    """Return `new` with copies of tensors that share memory with another entry of `old`.

    Such an entry may be overwritten before it is read.
    """
    places = {t.untyped_storage().data_ptr() for t in old.values()}
    return {
        n: t if t is old.get(n) or t.untyped_storage().data_ptr() not in places else t.clone()
        for n, t in new.items()
    }


def overwrite(old: Message, new: Message, *, in_place: bool) -> bool:
    """Replace the entries of `old` by those of `new`.

    Args:
        old: changed to hold what `new` holds.
        new: the new tensors.
        in_place: whether values are copied into the old tensors where names, shapes and types
            allow it.

    Returns:
        Whether tensors have moved although they should have stayed.
    """
    if new is old:
        return False
    if in_place:
        same = old.keys() == new.keys() and all(
            t.shape == old[n].shape and t.dtype == old[n].dtype for n, t in new.items()
        )
        if same:
            fresh = detached_from(new, old)
            moved = [name for name, tensor in fresh.items() if tensor is not old[name]]
            for dtype in {fresh[name].dtype for name in moved}:  # one kernel for all of a type
                names = [name for name in moved if fresh[name].dtype == dtype]
                torch._foreach_copy_([old[n] for n in names], [fresh[n] for n in names])
            return False
        new = {n: t.clone() for n, t in new.items()}
    changed = dict(new)
    old.clear()
    old.update(changed)
    return in_place

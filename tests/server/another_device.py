"""A device of its own for torch, "other": its tensors are the CPU's, but must not meet them.

Shows without a GPU whether all that meets is on one device. To import it changes torch for the
whole process.
"""

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("other")
OTHER = torch.device("other:0")
CROSSING = ("aten::_to_copy", "aten::copy_")  # these may take tensors of both devices


class Elsewhere(torch.Tensor):
    """A tensor on the other device; `here` holds its values."""

    @staticmethod
    def __new__(cls, here):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=OTHER,
        )
        made.here = here
        return made

    def __init__(self, here):
        pass

    @classmethod
    def __torch_dispatch__(cls, operation, types, given=(), named=None):
        return computed(operation, given, named or {})

    def tolist(self):
        return self.here.tolist()


def computed(operation, given, named):
    """On the CPU; of the other device is what comes of its tensors, or is asked to be there."""
    name = operation.name().partition(".")[0]
    leaves = []
    _each(leaves.append, (given, named))
    elsewhere = [each for each in leaves if isinstance(each, Elsewhere)]
    here = [each for each in leaves if isinstance(each, torch.Tensor) and each.device.type == "cpu"]
    if name not in CROSSING and elsewhere and any(each.dim() for each in here):
        raise RuntimeError(f"{operation} of tensors on two devices")
    wanted = named.get("device")
    there = bool(elsewhere) if wanted is None else torch.device(wanted).type == OTHER.type
    there &= name != "aten::copy_"  # which returns the tensor that it is given to change
    given, named = _each(_here, (given, named))
    changed = {id(each.here): each for each in elsewhere}  # where an operation returns its argument

    def sent(value):
        if id(value) in changed:
            return changed[id(value)]
        return Elsewhere(value) if there and isinstance(value, torch.Tensor) else value

    return _each(sent, operation(*given, **named))


def _each(act, value):
    """What `act` makes of each value in lists, tuples and dictionaries."""
    if isinstance(value, list | tuple):
        return type(value)([_each(act, each) for each in value])
    if isinstance(value, dict):
        return {name: _each(act, each) for name, each in value.items()}
    return act(value)


def _here(value):
    if isinstance(value, Elsewhere):
        return value.here
    return torch.device("cpu") if isinstance(value, torch.device) else value


LIBRARY = torch.library.Library("_", "IMPL")
LIBRARY.fallback(
    lambda operation, *given, **named: computed(operation, given, named), "PrivateUse1"
)


def _made_here_first(make):
    """torch does not ask the device in these, or asks it to change a tensor's size."""

    def making(*given, device=None, pin_memory=False, **named):
        made = make(*given, **named)
        return made if device is None else made.to(device)

    return making


torch.tensor, torch.arange = map(_made_here_first, (torch.tensor, torch.arange))
torch.inference_mode = torch.no_grad  # whose tensors cannot be wrapped

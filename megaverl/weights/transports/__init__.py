"""Transports: they carry the boxes of a plan, one module each; `megaverl.weights.reshard` defines their order.

`tensor_views` checks that tensors fit their layout, `dtypes` makes all ranks agree on
dtypes, and `transport` has the interface of a transport, its job, and messages of
bounded size.
"""

from megaverl.weights.transports.dtypes import agree_on_dtypes, converting, wire_dtypes
from megaverl.weights.transports.sent_weights import DeltaMode
from megaverl.weights.transports.tensor_views import (
    Tensors,
    check_tensors,
    view,
    viewed,
)
from megaverl.weights.transports.transport import (
    ALONE,
    BUCKET_BYTES,
    Message,
    Moved,
    TransferJob,
    Transport,
    TransportKind,
    TransportOptions,
    copy_boxes,
    messages,
    messages_by_dtype,
)

__all__ = [
    "ALONE",
    "BUCKET_BYTES",
    "DeltaMode",
    "Message",
    "Moved",
    "Tensors",
    "TransferJob",
    "Transport",
    "TransportKind",
    "TransportOptions",
    "agree_on_dtypes",
    "check_tensors",
    "converting",
    "copy_boxes",
    "messages",
    "messages_by_dtype",
    "view",
    "viewed",
    "wire_dtypes",
]

"""The data plane's methods with our own framing: the site's stubs and the server's handlers.

The service is the one of wire.proto; only chunks are read and written by `fedwan.link.framing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from fedwan.link import wire_pb2 as wire
from fedwan.link.framing import parser, serialize

__all__ = ["SERVICE", "Stub", "handlers"]

SERVICE = wire.DESCRIPTOR.services_by_name["DataPlane"].full_name


class Stub:
    """Calls of one channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.Join = _unary(channel, "Join", wire.Welcome)
        self.Report = _unary(channel, "Report", wire.Ack)
        self.Leave = _unary(channel, "Leave", wire.Ack)
        self.Control = channel.stream_stream(
            f"/{SERVICE}/Control",
            request_serializer=wire.SiteSignal.SerializeToString,
            response_deserializer=wire.CoordinatorSignal.FromString,
        )
        self.Upload = channel.stream_unary(
            f"/{SERVICE}/Upload",
            request_serializer=serialize,
            response_deserializer=wire.Receipt.FromString,
        )
        self.Download = channel.unary_stream(
            f"/{SERVICE}/Download",
            request_serializer=wire.DownloadRequest.SerializeToString,
            response_deserializer=parser(wire.DownloadHeader),
        )


def _unary(channel: grpc.Channel, name: str, reply: Any) -> Any:
    return channel.unary_unary(
        f"/{SERVICE}/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=reply.FromString,
    )


def handlers(servicer: Any) -> grpc.GenericRpcHandler:
    """Handlers for a servicer with a method per call.

    Bytes that are no message are refused with INVALID_ARGUMENT before the servicer sees them.
    """

    def unary(name: str, request: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            _checked(getattr(servicer, name)),
            request_deserializer=_tolerant(request.FromString),
            response_serializer=lambda message: message.SerializeToString(),
        )

    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Join": unary("Join", wire.Hello),
            "Report": unary("Report", wire.QualityReport),
            "Leave": unary("Leave", wire.Farewell),
            "Control": grpc.stream_stream_rpc_method_handler(
                _all_checked(servicer.Control),
                request_deserializer=_tolerant(wire.SiteSignal.FromString),
                response_serializer=wire.CoordinatorSignal.SerializeToString,
            ),
            "Upload": grpc.stream_unary_rpc_method_handler(
                _all_checked(servicer.Upload),
                request_deserializer=_tolerant(parser(wire.UploadHeader)),
                response_serializer=wire.Receipt.SerializeToString,
            ),
            "Download": grpc.unary_stream_rpc_method_handler(
                _checked(servicer.Download),
                request_deserializer=_tolerant(wire.DownloadRequest.FromString),
                response_serializer=serialize,
            ),
        },
    )


class _Garbage:
    """Stands for bytes that are no message.

    A deserializer that raised instead would leave gRPC's server unable to stop, now and then.
    """


def _tolerant(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_mark(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _Garbage()

    return parse_or_mark


def _checked(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A method that takes one message."""

    def behave(request: Any, context: Any) -> Any:
        return call(_refuse_garbage(request, context), context)

    return behave


def _all_checked(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A method that takes a stream of messages."""

    def behave(requests: Iterator[Any], context: Any) -> Any:
        return call((_refuse_garbage(request, context) for request in requests), context)

    return behave


def _refuse_garbage(request: Any, context: Any) -> Any:
    if isinstance(request, _Garbage):
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "what arrived is no message of fedwan's")
    return request

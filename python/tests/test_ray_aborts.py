"""The transport for Ray with a stand-in of Ray's interface: which aborts end which transfers."""
import importlib
import sys
import types

import nobounce
import pytest


@pytest.fixture
def transport(monkeypatch):
    names = ["torch", "ray", "ray.experimental", "ray.experimental.rdt", "ray.experimental.rdt.tensor_transport_manager"]
    modules = {name: types.ModuleType(name) for name in names}
    modules["ray.experimental"].register_tensor_transport = lambda *arguments: None
    manager = modules["ray.experimental.rdt.tensor_transport_manager"]
    for name in ("CommunicatorMetadata", "TensorTransportManager", "TensorTransportMetadata"):
        setattr(manager, name, type(name, (), {}))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "nobounce.ray", raising=False)
    module = importlib.import_module("nobounce.ray")
    made = module.Transport()
    transfer = types.SimpleNamespace(wait=lambda timeout: None, cancel=lambda: None)
    peer = types.SimpleNamespace(region=lambda name, timeout: name, read=lambda tensor, region: transfer)
    monkeypatch.setattr(made, "_peer", lambda metadata: peer)
    yield made
    sys.modules.pop("nobounce.ray", None)


def receive(transport, name):
    metadata = types.SimpleNamespace(names=("region",), tensor_device="cpu", tensor_meta=[])
    return transport.recv_multiple_tensors(name, metadata, None, target_buffers=["tensor"])


def test_an_abort_before_the_transfer_ends_it_once(transport):
    transport.abort_transport("object", None)
    with pytest.raises(nobounce.Cancelled):
        receive(transport, "object")
    assert receive(transport, "object") == ["tensor"]


def test_a_late_abort_ends_no_later_transfer(transport):
    assert receive(transport, "object") == ["tensor"]
    transport.abort_transport("object", None)
    assert receive(transport, "object") == ["tensor"]


def test_what_is_remembered_is_bounded(transport):
    for number in range(10_000):
        transport.abort_transport(str(number), None)
    assert len(transport._aborted) == 4096

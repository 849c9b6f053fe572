import ast
import asyncio
import json
import os
import pathlib
import struct
import subprocess
import sys

import nobounce
import pytest

numpy = pytest.importorskip("numpy")


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("NOBOUNCE_ADDR", f"127.{131 + os.getpid() % 60}.{os.getpid() // 60 % 250}.251")
    with nobounce.FileServer(tmp_path, "127.0.0.1:0", allow="127.0.0.0/8", write=True) as server:
        yield server


def test_local_files(tmp_path):
    path = tmp_path / "file"
    numbers = numpy.arange(100_000, dtype="u4")
    before = nobounce.file_stats()["written"].nbytes
    report = nobounce.write_file(numbers, path, 8)
    assert (report.paths, report.staged) == ({"cpu": 400_000}, {})
    assert nobounce.file_stats()["written"].nbytes - before == 400_000
    back = numpy.zeros_like(numbers)
    assert nobounce.read_file(back, path, 8).nbytes == 400_000
    assert (back == numbers).all()
    assert asyncio.run(nobounce.aread_file(back, path, 8)).nbytes == 400_000


def test_what_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"short")
    with pytest.raises(nobounce.FileError, match="which has 5 bytes"):
        nobounce.read_file(bytearray(6), path)
    with pytest.raises(nobounce.FileError, match="cannot open"):
        nobounce.read_file(bytearray(6), tmp_path / "missing")
    with pytest.raises(nobounce.ListError, match="read-only"):
        nobounce.read_file(b"constant", path)
    with pytest.raises(nobounce.ListError, match="offset -1"):
        nobounce.read_file(bytearray(1), path, -1)
    with pytest.raises(nobounce.ListError, match="not contiguous"):
        nobounce.read_file(numpy.zeros((4, 4))[:, 0], path)
    assert issubclass(nobounce.FileError, OSError)


def test_a_file_server(tmp_path, server):
    numbers = numpy.arange(1 << 18, dtype="u8")
    (tmp_path / "numbers").write_bytes(numbers.tobytes())
    with nobounce.Files(f"nb://{server.address}") as files:
        assert files.stat("numbers") == numbers.nbytes
        back = numpy.zeros(1000, "u8")
        assert files.read(back, "numbers", 800).wait(10) == 8000
        assert (back == numbers[100:1100]).all()
        ranges = [("numbers", 16 * at, 8, 8 * at) for at in range(1000)]
        assert files.read_list(back, ranges).wait(10) == 8000
        assert (back == numbers[:2000:2]).all()

        async def again():
            return await files.read(back, "numbers")

        assert asyncio.run(again()) == 8000
        files.write(numbers[:10].copy(), "new", 3).wait(10)
        assert (tmp_path / "new").read_bytes()[3:] == numbers[:10].tobytes()
        with pytest.raises(nobounce.FileError, match="leads out"):
            files.stat("../secret")
        with pytest.raises(nobounce.FileError, match="not inside of"):
            files.read(back, "new").wait(10)
        with pytest.raises(nobounce.ListError, match="not negative"):
            files.read_list(back, [("numbers", -1, 8, 0)])
        # Host memory has no direct path by BAR1, and needs none.
        assert files.read(back, "numbers", require="direct").wait(10) == 8000
        with pytest.raises(nobounce.Error, match="expected \"direct\" or None"):
            files.read(back, "numbers", require="other")
        assert sum(files.stats()["in"].values()) >= 24_000
    with pytest.raises(nobounce.Error, match="is closed"):
        files.stat("numbers")


# In a process of its own: its driver is the stand-in.
STAGED = """
import ctypes, os, sys
import nobounce

cuda = ctypes.CDLL(os.environ["NOBOUNCE_CUDA"])
context, pointer = ctypes.c_uint64(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxPushCurrent_v2(context) == 0 and cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(8000)) == 0


class Memory:
    __cuda_array_interface__ = {"shape": (8000,), "typestr": "|u1", "data": (pointer.value, False), "version": 3}


with nobounce.Files(sys.argv[1]) as files:
    try:
        assert files.read(Memory(), "numbers").wait(10) == 8000
    except nobounce.NotDirect as error:
        print("NotDirect:", error)
    try:
        files.read(Memory(), "numbers", require="direct")
        print("no error")
    except nobounce.NotDirect as error:
        print("NotDirect:", error)
    print(files.stats()["in"].get("staged"), files.staged())
"""


def stand_in():
    folder = pathlib.Path(nobounce.__file__).parents[2] / "debug"
    return next((path for path in (folder / "libfake_cuda.so", folder / "deps" / "libfake_cuda.so") if path.is_file()), None)


@pytest.mark.skipif(stand_in() is None, reason="no stand-in driver beside the package: cargo build -p nobounce-fake-cuda")
def test_memory_without_a_window(tmp_path, server):
    (tmp_path / "numbers").write_bytes(bytes(range(250)) * 32)

    def run(**variables):
        environment = {**os.environ, "NOBOUNCE_CUDA": str(stand_in()), "NOBOUNCE_WINDOW": "off", **variables}
        arguments = [sys.executable, "-c", STAGED, server.address]
        return subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout.splitlines()

    argument, counted = run()
    assert argument.startswith("NotDirect: bytes of the file would be staged"), argument
    reasons = ast.literal_eval(counted.removeprefix("8000 "))["in"]
    assert list(reasons.values()) == [8000] and "NOBOUNCE_WINDOW" in "".join(reasons), counted
    # The variable is refused alike, when the memory is registered.
    variable, argument, counted = run(NOBOUNCE_REQUIRE="direct")
    assert variable.startswith("NotDirect: ") and argument.startswith("NotDirect: "), (variable, argument)
    assert counted == "None {}"


def test_a_server_says_what_it_needs(tmp_path):
    with pytest.raises(nobounce.Error, match="name the peers that may connect"):
        nobounce.FileServer(tmp_path, "0.0.0.0:0")
    with pytest.raises(nobounce.Error, match="give the server and its clients a key"):
        nobounce.FileServer(tmp_path, "0.0.0.0:0", allow="10.0.0.0/8")
    with pytest.raises(nobounce.Error, match="writable only for named peers"):
        nobounce.FileServer(tmp_path, "127.0.0.1:0", write=True)
    with pytest.raises(nobounce.Error, match="neither an address nor a network"):
        nobounce.FileServer(tmp_path, "127.0.0.1:0", allow="host")
    with pytest.raises(nobounce.ConnectError):
        nobounce.Files("127.0.0.1:1", timeout=1)


def tensors():
    generator = numpy.random.default_rng(1)
    return {
        "weight": generator.standard_normal((300, 70), dtype="f4"),
        "half": generator.standard_normal(33, dtype="f4").astype("f2"),
        "scalar": numpy.array(7, "i8"),
        "flags": numpy.array([True, False, True]),
        "none": numpy.zeros((0, 4), "u1"),
    }


def test_safetensors(tmp_path, server):
    written = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "model.safetensors"
    written.save_file(tensors(), path, metadata={"format": "np"})
    for source in (path, str(path), f"nb://{server.address}/model.safetensors"):
        found = nobounce.load_safetensors(source, framework="numpy")
        expected = written.load_file(path)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape and (found[name] == tensor).all(), name


def test_safetensors_of_torch(tmp_path, server):
    torch = pytest.importorskip("torch")
    written = pytest.importorskip("safetensors.torch")
    generator = torch.Generator().manual_seed(1)
    names = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"]
    # Of odd lengths, so that tensors begin at any byte.
    tensors = {name: torch.rand(3, 7, generator=generator).mul(4).to(getattr(torch, name)) for name in names}
    tensors["byte"] = torch.tensor([1], dtype=torch.uint8)
    path = tmp_path / "model.safetensors"
    written.save_file(tensors, path)
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for source in (path, f"nb://{server.address}/model.safetensors"):
            found = nobounce.load_safetensors(source, device)
            expected = written.load_file(path, device)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert (found[name].dtype, found[name].shape, found[name].device) == (tensor.dtype, tensor.shape, tensor.device), name
                # As bytes: a number that is none is not equal to itself.
                assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def file_of(header, data=b""):
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"1234", "it has 4 bytes"),
        (struct.pack("<Q", 1 << 60), "longer than the file"),
        (file_of(b"no json"), "cannot be understood"),
        (file_of(b"[1]"), "cannot be understood"),
        (file_of(json.dumps({"a": {"shape": [1], "data_offsets": [0, 1]}}).encode()), "has no 'dtype'"),
        (file_of(json.dumps({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 1]}}).encode()), "not known"),
        (file_of(json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode(), b"abc"), "has bytes 0 to 4 of 3"),
        (file_of(json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 3]}}).encode(), b"abc"), "has bytes 0 to 3"),
        (file_of(json.dumps({"a": {"dtype": "U8", "shape": [-1, -3], "data_offsets": [0, 3]}}).encode(), b"abc"), "has bytes 0 to 3"),
        (file_of(json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}).encode(), b"abc"), "has bytes -1"),
        (file_of(json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}).encode(), b"ab"), "begins at byte 1, where 0 is expected"),
        (file_of(json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode(), b"ab"), "have 1 bytes of 2"),
        (file_of(json.dumps({"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}).encode(), b"a"), "no number of items"),
        (file_of(b"[" * 100_000), "cannot be understood"),
    ],
)
def test_malformed_safetensors(tmp_path, content, reason):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(nobounce.FileError, match=reason):
        nobounce.load_safetensors(str(path), framework="numpy")

"""A kubelet that knows device plugins only, and a plugin process with its directories. For tests/device_plugin_*.py."""
import concurrent.futures
import glob
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
import unittest

import deviceplugin_pb2 as api
import deviceplugin_pb2_grpc as services
import grpc

DEVICE = "nobounce.dev/nic=nb0"
# Nothing takes longer on a busy machine.
TIMEOUT = 20


class Kubelet(services.RegistrationServicer):
    """As the kubelet does: clears the plugin directory at its start, connects to a plugin before it answers Register, then watches it."""

    def __init__(self, directory):
        self.directory = directory
        self.registrations = queue.Queue()
        self.lists = queue.Queue()  # (resource, [devices])
        self.refusals = []  # messages for the next registrations
        self.server = None
        self.channels = []

    def start(self, clear=True):
        os.makedirs(self.directory, exist_ok=True)
        socket = os.path.join(self.directory, "kubelet.sock")
        for path in glob.glob(os.path.join(self.directory, "*.sock")) if clear else [socket]:
            if os.path.lexists(path):
                os.unlink(path)
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
        services.add_RegistrationServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix:{socket}")
        self.server.start()

    def stop(self):
        if self.server:
            self.server.stop(None).wait()
        for channel in self.channels:
            channel.close()
        self.server, self.channels = None, []

    def Register(self, request, context):
        if self.refusals:
            context.abort(grpc.StatusCode.UNKNOWN, self.refusals.pop(0))
        if request.version != "v1beta1":
            context.abort(grpc.StatusCode.UNKNOWN, "unsupported version")
        channel = self.open(os.path.join(self.directory, request.endpoint))
        grpc.channel_ready_future(channel).result(timeout=10)
        threading.Thread(target=self._watch, args=(channel, request.resource_name), daemon=True).start()
        self.registrations.put(request)
        return api.Empty()

    def _watch(self, channel, resource):
        try:
            for answer in services.DevicePluginStub(channel).ListAndWatch(api.Empty()):
                self.lists.put((resource, list(answer.devices)))
        except (grpc.RpcError, ValueError):
            pass  # the plugin or this kubelet has ended

    def registered(self, timeout=TIMEOUT):
        return self.registrations.get(timeout=timeout)

    def plugin(self, registration):
        return services.DevicePluginStub(self.open(os.path.join(self.directory, registration.endpoint)))

    def open(self, path):
        # The kubelet names this authority, too; the path, gRPC's default, is not a valid one in HTTP/2.
        channel = grpc.insecure_channel(f"unix:{path}", options=[("grpc.default_authority", "localhost")])
        self.channels.append(channel)
        return channel


class Case(unittest.TestCase):
    """A directory with CDI files and one for sockets; processes that end with the test."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="c")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.plugins = os.path.join(self.folder, "plugins")
        self.cdi = os.path.join(self.folder, "cdi")
        os.makedirs(self.plugins)
        os.makedirs(self.cdi)
        self.define()
        self.kubelet = Kubelet(self.plugins)
        self.addCleanup(self.kubelet.stop)
        self.processes = 0

    def define(self):
        """Writes the CDI file."""
        with open(os.path.join(self.cdi, "nobounce.json"), "w") as file:
            json.dump({"cdiVersion": "0.6.0", "kind": "nobounce.dev/nic", "devices": [{"name": "nb0"}, {"name": "all"}]}, file)

    def undefine(self):
        os.unlink(os.path.join(self.cdi, "nobounce.json"))

    def start(self, *options):
        """A plugin process; its log lines are in log()."""
        self.processes += 1
        log = os.path.join(self.folder, f"log{self.processes}")
        command = [os.environ["DEVICE_PLUGIN"], "--plugin-dir", self.plugins, "--cdi-dir", self.cdi, "--cdi-interval", "1", *options]
        with open(log, "wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        process.log = log
        self.addCleanup(self.end, process, signal.SIGKILL)
        return process

    def end(self, process, how):
        if process.poll() is None:
            process.send_signal(how)
        return process.wait(TIMEOUT)

    def registered_plugin(self, *options):
        """A kubelet with a plugin: (process, stub)."""
        self.kubelet.start()
        process = self.start(*options)
        return process, self.kubelet.plugin(self.kubelet.registered())

    def log(self, process):
        with open(process.log) as file:
            return file.read().splitlines()

    def wait_until(self, condition, what):
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            self.assertLess(time.monotonic(), deadline, f"not in {TIMEOUT} s: {what}")
            time.sleep(0.02)

    def assertLogged(self, process, part, times=1):
        """Waits until so many lines have the text; more are a failure."""
        def count():
            return sum(part in line for line in self.log(process))
        self.wait_until(lambda: count() >= times, f"{times} log lines with {part!r}")
        self.assertEqual(count(), times, part)

    def next_list(self, health, count=16, resource="nobounce.dev/nic"):
        name, devices = self.kubelet.lists.get(timeout=TIMEOUT)
        self.assertEqual(name, resource)
        self.assertEqual([(device.ID, device.health) for device in devices], [(f"nic-{n}", health) for n in range(count)])

    def assertFails(self, code, part, call, *arguments, **options):
        with self.assertRaises(grpc.RpcError) as caught:
            call(*arguments, timeout=TIMEOUT, **options)
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        self.assertIn(part, caught.exception.details())

    def sockets(self):
        return sorted(name for name in os.listdir(self.plugins) if name != "kubelet.sock")


def allocation(*containers):
    return api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(devices_ids=ids) for ids in containers])

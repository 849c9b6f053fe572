"""What the kubelet asks a device plugin, right and wrong."""
import json
import os
import signal
import socket
import subprocess

import deviceplugin_pb2 as api
import grpc
from device_plugin_stub import DEVICE, TIMEOUT, Case, allocation

INVALID = grpc.StatusCode.INVALID_ARGUMENT


class Calls(Case):
    def test_registration(self):
        self.kubelet.start()
        self.start()
        request = self.kubelet.registered()
        self.assertEqual(request.version, "v1beta1")
        self.assertEqual(request.resource_name, "nobounce.dev/nic")
        self.assertEqual(self.sockets(), [request.endpoint])
        self.assertEqual(request.options, api.DevicePluginOptions())
        self.assertTrue(request.HasField("options"))
        self.next_list("Healthy")

    def test_health_follows_the_cdi_file(self):
        process, plugin = self.registered_plugin("--count", "2")
        self.next_list("Healthy", 2)
        self.undefine()
        self.next_list("Unhealthy", 2)
        self.assertFails(grpc.StatusCode.FAILED_PRECONDITION, "nobounce cdi generate", plugin.Allocate, allocation(["nic-0"]))
        self.define()
        self.next_list("Healthy", 2)
        plugin.Allocate(allocation(["nic-0"]), timeout=TIMEOUT)
        self.assertLogged(process, "nobounce cdi generate")
        self.assertTrue(self.kubelet.lists.empty())

    def test_unhealthy_at_the_start(self):
        self.undefine()
        process, _ = self.registered_plugin()
        self.next_list("Unhealthy")
        self.assertLogged(process, "nobounce cdi generate")
        # In YAML, as other tools write CDI files.
        with open(os.path.join(self.cdi, "nobounce.yaml"), "w") as file:
            file.write("cdiVersion: 0.6.0\nkind: nobounce.dev/nic\ndevices:\n- name: nb0\n  containerEdits:\n    env: [A=b]\n")
        self.next_list("Healthy")

    def test_file_of_the_generator(self):
        self.undefine()
        command = [os.environ["NOBOUNCE"], "cdi", "generate", "--addr", "eth0,eth1", "--out", os.path.join(self.cdi, "nobounce.json")]
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
        for device, health in ("nb0", "Healthy"), ("nb1", "Healthy"), ("all", "Healthy"), ("nb2", "Unhealthy"):
            process, _ = self.registered_plugin("--cdi-device", f"nobounce.dev/nic={device}")
            self.next_list(health)
            self.end(process, signal.SIGTERM)
            self.kubelet.stop()

    def test_health_follows_the_libraries(self):
        libraries = os.path.join(self.folder, "libraries")
        os.makedirs(libraries)
        open(os.path.join(libraries, "libibverbs.so.1"), "w").close()
        with open(os.path.join(self.cdi, "nobounce.json"), "w") as file:
            json.dump({"cdiVersion": "0.5.0", "kind": "nobounce.dev/nic", "devices": [{"name": "nb0"}],
                       "containerEdits": {"mounts": [{"hostPath": libraries, "containerPath": "/opt/nb"}]}}, file)
        process, _ = self.registered_plugin("--count", "2")
        self.next_list("Healthy", 2)
        os.rename(libraries, libraries + "-gone")
        self.next_list("Unhealthy", 2)
        self.assertLogged(process, "where nothing is")
        os.rename(libraries + "-gone", libraries)
        self.next_list("Healthy", 2)

    def test_options(self):
        _, plugin = self.registered_plugin()
        self.assertEqual(plugin.GetDevicePluginOptions(api.Empty(), timeout=TIMEOUT), api.DevicePluginOptions())

    def test_allocate(self):
        _, plugin = self.registered_plugin()
        for containers in [["nic-0"]], [["nic-15", "nic-3"]], [["nic-1"], ["nic-2", "nic-0"], ["nic-9"]]:
            answer = plugin.Allocate(allocation(*containers), timeout=TIMEOUT)
            wanted = api.ContainerAllocateResponse(cdi_devices=[api.CDIDevice(name=DEVICE)])
            self.assertEqual(list(answer.container_responses), [wanted] * len(containers))

    def test_allocate_another_cdi_device(self):
        _, plugin = self.registered_plugin("--cdi-device", "nobounce.dev/nic=all")
        self.next_list("Healthy")
        answer = plugin.Allocate(allocation(["nic-0"]), timeout=TIMEOUT)
        self.assertEqual(answer.container_responses[0].cdi_devices[0].name, "nobounce.dev/nic=all")

    def test_bytes_of_an_allocation(self):
        """Field numbers, independent of deviceplugin.proto."""
        self.registered_plugin()
        allocate = self.kubelet.channels[-1].unary_unary("/v1beta1.DevicePlugin/Allocate")
        answer = allocate(b"\x0a\x07\x0a\x05nic-7", timeout=TIMEOUT)
        self.assertEqual(answer, b"\x0a\x18\x2a\x16\x0a\x14nobounce.dev/nic=nb0")

    def test_wrong_allocations(self):
        _, plugin = self.registered_plugin("--count", "3")
        for part, request in [
            ("names no container", allocation()),
            ("container 1 of the request names no device", allocation(["nic-0"], [])),
            ('unknown device "nic-3": this plugin has nic-0 to nic-2', allocation(["nic-3"])),
            ('unknown device ""', allocation([""])),
            ("named twice", allocation(["nic-0", "nic-0"])),
            ("names 4 devices, and this plugin has 3", allocation(["nic-0"] * 4)),
            ("names 10000 devices", allocation(*[["nic-0"]] * 10000)),
            ("xxx...", allocation(["x" * 100000])),
        ]:
            self.assertFails(INVALID, part, plugin.Allocate, request)
        # Longer than any request of a kubelet.
        self.assertFails(grpc.StatusCode.OUT_OF_RANGE, "too large", plugin.Allocate, allocation(["x" * (2 << 20)]))
        plugin.Allocate(allocation(["nic-0"]), timeout=TIMEOUT)

    def test_preferred_allocation(self):
        _, plugin = self.registered_plugin()

        def request(size, available, must=()):
            one = api.ContainerPreferredAllocationRequest(available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size)
            return api.PreferredAllocationRequest(container_requests=[one])

        answer = plugin.GetPreferredAllocation(request(2, ["nic-4", "nic-5", "nic-6"], ["nic-6"]), timeout=TIMEOUT)
        self.assertEqual(list(answer.container_responses[0].deviceIDs), ["nic-6", "nic-4"])
        for wrong in request(0, ["nic-4"]), request(-1, ["nic-4"]), request(2, ["nic-4"]), request(1, ["other"]), request(1, ["nic-1"] * 20):
            self.assertFails(INVALID, "", plugin.GetPreferredAllocation, wrong)

    def test_pre_start_container(self):
        _, plugin = self.registered_plugin()
        plugin.PreStartContainer(api.PreStartContainerRequest(devices_ids=["nic-0"]), timeout=TIMEOUT)
        self.assertFails(INVALID, "unknown device", plugin.PreStartContainer, api.PreStartContainerRequest(devices_ids=["nb0"]))
        self.assertFails(INVALID, "names no device", plugin.PreStartContainer, api.PreStartContainerRequest())

    def test_malformed_bytes(self):
        process, plugin = self.registered_plugin()
        path = os.path.join(self.plugins, self.sockets()[0])
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        for data in [b"\0" * 64, os.urandom(4096), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", preface + os.urandom(4096),
                     preface + b"\xff\xff\xff\x00\x00\x00\x00\x00\x00", preface[:10], b""]:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(TIMEOUT)
                connection.connect(path)
                try:
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(4096):
                        pass
                except OSError:
                    pass  # the plugin closed it
        channel = self.kubelet.channels[-1]
        for method in "Allocate", "GetPreferredAllocation", "PreStartContainer":
            call = channel.unary_unary(f"/v1beta1.DevicePlugin/{method}")
            for data in b"\xff\xff\xff\xff", b"\x0a\x7f\x00", b"\x0a\x04\x0a\x02\xff\xfe":
                self.assertFails(grpc.StatusCode.INTERNAL, "", call, data)
        self.assertFails(grpc.StatusCode.UNIMPLEMENTED, "not a method", channel.unary_unary("/v1beta1.DevicePlugin/Other"), b"")
        plugin.Allocate(allocation(["nic-0"]), timeout=TIMEOUT)
        self.assertIsNone(process.poll())

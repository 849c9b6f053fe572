"""Start, restart and end of the kubelet and of the plugin."""
import os
import signal
import socket
import subprocess

from device_plugin_stub import TIMEOUT, Case, allocation


class Life(Case):
    def test_kubelet_restarts(self):
        process, _ = self.registered_plugin()
        self.next_list("Healthy")
        self.kubelet.stop()
        self.kubelet.start()
        plugin = self.kubelet.plugin(self.kubelet.registered())
        self.next_list("Healthy")
        plugin.Allocate(allocation(["nic-0"]), timeout=TIMEOUT)
        self.assertLogged(process, "removed")
        self.assertLogged(process, "registered with the kubelet", times=2)

    def test_kubelet_restarts_without_removing_sockets(self):
        process, _ = self.registered_plugin()
        self.next_list("Healthy")
        self.kubelet.stop()
        self.kubelet.start(clear=False)
        self.kubelet.registered()
        self.next_list("Healthy")
        self.assertEqual(len(self.sockets()), 1)

    def test_plugin_socket_removed(self):
        self.registered_plugin()
        os.unlink(os.path.join(self.plugins, self.sockets()[0]))
        plugin = self.kubelet.plugin(self.kubelet.registered())
        plugin.Allocate(allocation(["nic-0"]), timeout=TIMEOUT)

    def test_kubelet_comes_late(self):
        os.rmdir(self.plugins)
        process = self.start()
        self.assertLogged(process, "--plugin-dir")
        os.mkdir(self.plugins)
        self.assertLogged(process, "waiting for the kubelet")
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(os.path.join(self.plugins, "kubelet.sock"))
        self.assertLogged(process, "takes no connection")
        self.kubelet.start()
        self.kubelet.registered()
        self.assertLogged(process, "registered with the kubelet")
        self.assertLogged(process, "--plugin-dir")
        self.assertLogged(process, "takes no connection")

    def test_kubelet_refuses(self):
        self.kubelet.refusals = ["the ResourceName is not welcome"] * 2
        process, plugin = self.registered_plugin()
        plugin.Allocate(allocation(["nic-0"]), timeout=TIMEOUT)
        self.assertLogged(process, "registered with the kubelet")
        self.assertLogged(process, "the ResourceName is not welcome")

    def test_two_resources(self):
        self.kubelet.start()
        process = self.start("--resource", "nobounce.dev/nic", "--resource", "rdma/hca_shared_devices_a", "--count", "3")
        requests = {request.resource_name: request for request in (self.kubelet.registered(), self.kubelet.registered())}
        self.assertEqual(sorted(requests), ["nobounce.dev/nic", "rdma/hca_shared_devices_a"])
        self.assertEqual(self.sockets(), sorted(request.endpoint for request in requests.values()))
        self.assertEqual(len(self.sockets()), 2)
        for request in requests.values():
            answer = self.kubelet.plugin(request).Allocate(allocation(["nic-2"]), timeout=TIMEOUT)
            self.assertEqual(answer.container_responses[0].cdi_devices[0].name, "nobounce.dev/nic=nb0")
        self.assertEqual(self.end(process, signal.SIGTERM), 0)
        self.assertEqual(self.sockets(), [])

    def test_signals_end_it_without_a_trace(self):
        for how in signal.SIGTERM, signal.SIGINT:
            process, _ = self.registered_plugin()
            self.next_list("Healthy")
            self.assertEqual(self.end(process, how), 0)
            self.assertEqual(self.sockets(), [])
            self.assertIn(f"ended by {how.name}", self.log(process)[-1])
            self.kubelet.stop()
        # While it waits for the kubelet, and for the directory.
        for wait in "waiting for the kubelet", "--plugin-dir":
            process = self.start()
            self.assertLogged(process, wait)
            self.assertEqual(self.end(process, signal.SIGTERM), 0)
            os.path.exists(self.plugins) and os.rmdir(self.plugins)

    def test_socket_of_a_killed_plugin_is_replaced(self):
        process, _ = self.registered_plugin()
        self.end(process, signal.SIGKILL)
        self.assertEqual(len(self.sockets()), 1)
        self.start()
        plugin = self.kubelet.plugin(self.kubelet.registered())
        plugin.Allocate(allocation(["nic-0"]), timeout=TIMEOUT)

    def test_second_instance_waits_for_the_first(self):
        first, plugin = self.registered_plugin()
        second = self.start()
        self.assertLogged(second, "another process serves")
        plugin.Allocate(allocation(["nic-0"]), timeout=TIMEOUT)
        self.end(first, signal.SIGTERM)
        self.kubelet.registered()
        self.assertLogged(second, "registered with the kubelet")
        self.assertLogged(second, "another process serves")

    def test_a_process_that_takes_no_connection_does_not_stop_it(self):
        path = os.path.join(self.plugins, "nobounce-nobounce.dev_nic.sock")
        with socket.socket(socket.AF_UNIX) as stopped, socket.socket(socket.AF_UNIX) as waiting:
            stopped.bind(path)
            stopped.listen(0)
            waiting.connect(path)  # the queue is full
            process = self.start()
            self.assertLogged(process, "another process serves")
        self.kubelet.start(clear=False)
        self.kubelet.registered()
        self.assertEqual(self.end(process, signal.SIGTERM), 0)

    def test_wrong_usage(self):
        for part, *options in [
            ("a resource needs a domain", "--resource", "nic"),
            ("Kubernetes reserves the domain", "--resource", "kubernetes.io/nic"),
            ("is not a CDI device", "--cdi-device", "nb0"),
            ("is given twice", "--resource", "a/b", "--resource", "a/b"),
            ("use a shorter --plugin-dir", "--plugin-dir", "/" + "x" * 100),
            ("--count", "--count", "0"),
        ]:
            ran = subprocess.run([os.environ["DEVICE_PLUGIN"], *options], capture_output=True, text=True, timeout=TIMEOUT)
            self.assertEqual(ran.returncode, 2, ran.stderr)
            self.assertIn(part, ran.stderr)

    def test_closed_stderr_does_not_end_it(self):
        self.kubelet.start()
        command = [os.environ["DEVICE_PLUGIN"], "--plugin-dir", self.plugins, "--cdi-dir", self.cdi]
        reader, writer = os.pipe()
        os.close(reader)
        process = subprocess.Popen(command, stderr=writer)
        os.close(writer)
        self.addCleanup(self.end, process, signal.SIGKILL)
        self.kubelet.registered()
        self.assertEqual(self.end(process, signal.SIGTERM), 0)

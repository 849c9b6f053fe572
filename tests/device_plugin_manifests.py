"""The manifests of kubernetes/ against the published schema, and against the plugin."""
import glob
import json
import os
import subprocess
import tempfile
import unittest

import kubernetes_validate
import yaml
from from_pip import ROOT

FOLDER = os.path.join(ROOT, "kubernetes")
# The first version with image volumes on by default, and the newest one that the validator knows.
VERSIONS = ["1.35", kubernetes_validate.latest_version()]


def documents(name):
    with open(os.path.join(FOLDER, name)) as file:
        return list(yaml.safe_load_all(file))


def pod_of(document):
    return document["spec"]["template"]["spec"] if "template" in document["spec"] else document["spec"]


class Manifests(unittest.TestCase):
    def test_schema(self):
        files = sorted(os.path.basename(path) for path in glob.glob(os.path.join(FOLDER, "*.yaml")))
        self.assertEqual(files, ["device-plugin.yaml", "pod-image-volume.yaml", "pod-two-ranks.yaml"])
        for name in files:
            for document in documents(name):
                for version in VERSIONS:
                    with self.subTest(name, kind=document["kind"], version=version):
                        kubernetes_validate.validate(document, version, strict=True)

    def test_the_validator_notices_faults(self):
        [document] = documents("device-plugin.yaml")
        pod_of(document)["containers"][0]["volumeMount"] = []
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(document, VERSIONS[-1], strict=True)

    def test_the_daemon_set_starts_the_plugin_with_little_privilege(self):
        [document] = documents("device-plugin.yaml")
        pod = pod_of(document)
        [container] = pod["containers"]
        # The plugin itself refuses wrong arguments before it prints its help.
        command = [os.environ["DEVICE_PLUGIN"], *container["command"][1:], *container.get("args", []), "--version"]
        self.assertEqual(subprocess.run(command, capture_output=True, timeout=20).returncode, 0)
        self.assert_little_privilege(pod, container)
        paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"]}
        self.assertEqual(sorted(paths.values()), ["/etc/cdi", "/opt/nobounce", "/var/lib/kubelet/device-plugins", "/var/run/cdi"])
        mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
        self.assertEqual(mounts, {"/etc/cdi": True, "/opt/nobounce": True, "/var/lib/kubelet/device-plugins": False, "/var/run/cdi": True})
        for mount in container["volumeMounts"]:
            self.assertEqual(mount["mountPath"], paths[mount["name"]])

    def assert_little_privilege(self, pod, container):
        context = container["securityContext"]
        self.assertEqual(context["capabilities"], {"drop": ["ALL"]})
        self.assertTrue(context["readOnlyRootFilesystem"])
        self.assertFalse(context["allowPrivilegeEscalation"])
        self.assertFalse(context.get("privileged", False))
        self.assertEqual(pod["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})

    def test_the_init_container_installs_what_the_plugin_offers(self):
        [document] = documents("device-plugin.yaml")
        pod = pod_of(document)
        [init], [container] = pod["initContainers"], pod["containers"]
        self.assert_little_privilege(pod, init)
        self.assertEqual(init["image"], container["image"])
        # Its command, run on folders that stand for the host's.
        with tempfile.TemporaryDirectory() as folder:
            inside = {}
            paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"]}
            for mount in init["volumeMounts"]:
                self.assertEqual(mount["mountPath"], paths[mount["name"]])
                self.assertFalse(mount.get("readOnly", False))
                inside[mount["mountPath"]] = folder + mount["mountPath"]
                os.makedirs(inside[mount["mountPath"]])
            arguments = []
            for argument in init["args"]:
                option, _, path = argument.partition("=")
                [at] = [at for at in inside if path.startswith(at + "/")] if path else [None]
                arguments.append(f"{option}={folder}{path}" if at else argument)
            subprocess.run([os.environ["NOBOUNCE"], *arguments], check=True, capture_output=True, timeout=60)
            [out] = [argument.removeprefix("--out=") for argument in arguments if argument.startswith("--out=")]
            with open(out) as file:
                written = json.load(file)
            [mount] = written["containerEdits"]["mounts"]
            self.assertTrue(mount["hostPath"].startswith(inside["/opt/nobounce"]))
            for library in next(set_ for set_ in written["devices"][0]["containerEdits"]["env"] if set_.startswith("LD_PRELOAD=")).partition("=")[2].split(":"):
                self.assertTrue(os.path.isfile(mount["hostPath"] + library.removeprefix(mount["containerPath"])), library)

    def test_requests(self):
        resources = [container["resources"]["limits"] for document in documents("pod-two-ranks.yaml") if document["kind"] == "Job"
                     for container in pod_of(document)["containers"]]
        self.assertTrue(resources)
        for limits in resources:
            self.assertEqual(limits["nobounce.dev/nic"], 1)
        [pod] = documents("pod-image-volume.yaml")
        for container in pod_of(pod)["containers"]:
            self.assertNotIn("nobounce.dev/nic", container.get("resources", {}).get("limits", {}))

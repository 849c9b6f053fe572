//! Servers with a key: requests are sealed, and those of other devices reach no file.

use std::time::Duration;

use nobounce::nic::links::LinkChoice;
use nobounce::nic::links::sealed::{KeySource, SealKeys};
use nobounce::{Config, Device};
use nobounce_protocol::seal::{KeyRing, SealMode};
use nobounce_storage::{ClientError, FileClient, FileServer, ServerOptions};
use nobounce_transfer::AgentOptions;

use crate::{Folder, MIB, SOON, bytes_of, config, range};

fn device(digits: Option<&str>) -> Device {
    let ring = digits.map(|digits| KeyRing::parse(&digits.repeat(32)).unwrap());
    let keys =
        |ring| SealKeys { source: KeySource::Descriptor(-1), ring, mode: SealMode::Encrypt, version: None };
    // Shared memory needs no key: the kernel knows the user.
    Device::open_with(&Config { link: LinkChoice::Udp, key: ring.map(keys), ..config() }).unwrap()
}

#[test]
fn requests_need_the_key_of_the_server() {
    let folder = Folder::new("keys");
    let bytes = folder.add("file", MIB);
    let agent = AgentOptions {
        silence: Duration::from_millis(700),
        allow: "127.0.0.0/8".parse().unwrap(),
        ..AgentOptions::default()
    };
    let listen = "127.0.0.1:0".parse().unwrap();
    let options =
        ServerOptions { listen, is_writable: true, agent: agent.clone(), ..ServerOptions::default() };
    let server = FileServer::start(&device(Some("5a")), &folder.0, options).unwrap();
    let connect =
        |digits| FileClient::connect_with(&device(digits), server.local_addr(), agent.clone(), SOON);
    for digits in [None, Some("5b")] {
        // The handshake is not sealed.
        let client = connect(digits).unwrap();
        let memory = client.register(4096).unwrap();
        let write = client.write(&memory, &[("new", &[range(0, 4096, 0)])]).unwrap();
        let answer = write.wait(SOON);
        assert!(matches!(answer, Err(ClientError::Connect { .. })), "{answer:?}");
    }
    assert!(!folder.0.join("new").exists());
    let client = connect(Some("5a")).unwrap();
    let memory = client.register(MIB).unwrap();
    client.read(&memory, &[("file", &[range(0, MIB, 0)])]).unwrap().wait(SOON).unwrap();
    assert!(bytes_of(&memory, 0, MIB) == bytes);
    client.write(&memory, &[("new", &[range(0, 4096, 0)])]).unwrap().wait(SOON).unwrap();
    assert_eq!(std::fs::read(folder.0.join("new")).unwrap(), bytes[..4096]);
}

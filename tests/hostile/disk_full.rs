//! A small file system of the test's own fills up while messages come in (E22, lesson F1).

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

use narad_harness::process::Broker;

use crate::support::{binary, error_of, eventually, Scratch, PATIENCE};

/// An ext4 image, mounted. Gone at the end.
struct SmallDisk {
    at: PathBuf,
    _scratch: Scratch,
}

impl SmallDisk {
    /// `None`, with a message, where this process may not mount anything.
    fn mount(name: &str, mebibytes: u64) -> Option<SmallDisk> {
        let scratch = Scratch::new(name);
        let (image, at) = (scratch.path("image"), scratch.path("mnt"));
        fs::create_dir_all(&at).unwrap();
        fs::File::create(&image).unwrap().set_len(mebibytes << 20).unwrap();
        let run = |program: &str, arguments: &[&str]| {
            Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success())
        };
        let made = run("mkfs.ext4", &["-q", "-F", "-m", "0", image.to_str().unwrap()])
            && run("mount", &["-o", "loop", image.to_str().unwrap(), at.to_str().unwrap()]);
        if !made {
            eprintln!("skipped: mounting an ext4 image needs root, mkfs.ext4 and loop devices");
            return None;
        }
        Some(SmallDisk { at, _scratch: scratch })
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).status();
    }
}

const ARGUMENTS: [&str; 5] = ["--no-pin", "--memory", "256MiB", "--shards", "1"];

/// Takes all space but `leave_mebibytes`.
fn fill(disk: &SmallDisk, leave_mebibytes: u64) -> PathBuf {
    let ballast = disk.at.join("ballast");
    let free = Command::new("df").args(["--output=avail", "-B1"]).arg(&disk.at).output().unwrap();
    let free: u64 = String::from_utf8_lossy(&free.stdout).lines().nth(1).unwrap().trim().parse().unwrap();
    // The file's own metadata needs some of it.
    let bytes = free - (leave_mebibytes << 20) - (4 << 20);
    let status = Command::new("fallocate").arg("-l").arg(bytes.to_string()).arg(&ballast).status().unwrap();
    assert!(status.success());
    if leave_mebibytes == 0 {
        let mut file = fs::OpenOptions::new().append(true).open(&ballast).unwrap();
        for piece in [1 << 20, 4 << 10] {
            while file.write_all(&vec![1; piece]).and_then(|()| file.sync_data()).is_ok() {}
        }
    }
    ballast
}

#[test]
fn e22_f1_a_full_disk_refuses_produce_alone_and_heals() {
    let Some(disk) = SmallDisk::mount("disk-full", 700) else { return };
    let data = disk.at.join("data");
    let mut broker = Broker::start(binary(), &data, &ARGUMENTS).unwrap();
    let mut client = broker.client();
    for topic in ["t", "other"] {
        let created = client.post("/v1/topics", format!("{{\"name\":\"{topic}\"}}").as_bytes()).unwrap();
        assert_eq!(created.status, 201);
    }
    let mut accepted = 0;
    for n in 0..50 {
        assert_eq!(client.post("/v1/topics/t/produce", format!("{n}").as_bytes()).unwrap().status, 202);
        accepted += 1;
    }
    // Below the reserve: refused ahead of ENOSPC, with the way out.
    let ballast = fill(&disk, 60);
    eventually("produce is refused under the reserve", || {
        let answer = client.post("/v1/topics/t/produce", b"\"x\"").unwrap();
        accepted += u64::from(answer.status == 202);
        if answer.status == 202 {
            return false;
        }
        assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")), "{}", answer.text());
        assert_eq!(error_of(&answer), "free disk space is under the reserve, retry");
        true
    });
    let batch = client
        .request(
            "POST",
            "/v1/topics/t/produce/batch",
            &[("Content-Type", "application/json")],
            b"{\"messages\":[{\"payload\":1}]}",
        )
        .unwrap();
    assert_eq!(batch.status, 503, "{}", batch.text());
    // And all the way to the last block.
    fs::remove_file(&ballast).unwrap();
    let ballast = fill(&disk, 0);
    let consume_and_ack = |client: &mut narad_harness::client::Client| {
        let message = client.get("/v1/topics/t/consume?wait=5s").unwrap();
        assert_eq!(message.status, 200, "{}", message.text());
        let handle = message.json()["receipt_handle"].as_str().unwrap().to_owned();
        let acked = client.post(&format!("/v1/topics/t/ack?receipt_handle={handle}"), b"").unwrap();
        assert_eq!(acked.status, 204, "{}", acked.text());
    };
    let mut consumed = 0;
    for _ in 0..20 {
        consume_and_ack(&mut client);
        consumed += 1;
    }
    // Past an interval of the position writes, which must not have failed for good.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    consume_and_ack(&mut client);
    consumed += 1;
    let deleted = client.delete("/v1/topics/other").unwrap();
    assert_eq!(deleted.status, 204, "{}", deleted.text());
    assert_eq!(client.get("/readyz").unwrap().status, 200);
    let refused = client.post("/v1/topics/t/produce", b"\"x\"").unwrap();
    assert!(matches!(refused.status, 500 | 503), "{}", refused.text());
    // A start on a full disk says so or works; it never harms.
    // The log lies on the full disk as well: lines are lost, and nothing else.
    assert_eq!(broker.stop(PATIENCE).unwrap().code(), Some(0), "{}", broker.log_text());
    // From here on the log lies beside this name, where there is room.
    let roomy = disk.at.with_file_name("data");
    std::os::unix::fs::symlink(&data, &roomy).unwrap();
    let mut again = Broker::spawn(binary(), &roomy, &ARGUMENTS).unwrap();
    match again.wait_ready(PATIENCE) {
        Ok(()) => assert_eq!(again.stop(PATIENCE).unwrap().code(), Some(0)),
        Err(_) => {
            let text = again.log_text();
            assert_eq!(again.wait_exit(PATIENCE).unwrap().code(), Some(1), "{text}");
            let last = text.lines().last().unwrap_or_default();
            assert!(last.starts_with("narad: ") && last.contains("space"), "{text}");
        }
    }
    // Freed space heals it.
    fs::remove_file(&ballast).unwrap();
    let mut broker = Broker::start(binary(), &data, &ARGUMENTS).unwrap();
    let mut client = broker.client();
    eventually("produce is taken again", || {
        let answer = client.post("/v1/topics/t/produce", b"\"healed\"").unwrap();
        accepted += u64::from(answer.status == 202);
        answer.status == 202
    });
    let mut rest = 0;
    loop {
        let answer = client.get("/v1/topics/t/consume?max=100&wait=1s").unwrap();
        if answer.status == 204 {
            break;
        }
        rest += answer.json()["messages"].as_array().unwrap().len() as u64;
    }
    assert_eq!(consumed + rest, accepted, "a message was lost, or acked and delivered again");
    assert_eq!(broker.stop(PATIENCE).unwrap().code(), Some(0));
}

#[test]
fn freed_space_heals_a_running_broker() {
    let Some(disk) = SmallDisk::mount("disk-heals", 700) else { return };
    let mut broker = Broker::start(binary(), &disk.at.join("data"), &ARGUMENTS).unwrap();
    let mut client = broker.client();
    assert_eq!(client.post("/v1/topics", b"{\"name\":\"t\"}").unwrap().status, 201);
    for _ in 0..3 {
        let ballast = fill(&disk, 0);
        eventually("produce is refused", || client.post("/v1/topics/t/produce", b"1").unwrap().status == 503);
        fs::remove_file(&ballast).unwrap();
        eventually("produce is taken again", || client.post("/v1/topics/t/produce", b"1").unwrap().status == 202);
    }
    assert_eq!(broker.stop(PATIENCE).unwrap().code(), Some(0));
}

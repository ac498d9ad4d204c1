//! Whatever bytes come, in whatever pieces: every connection ends, nothing panics, and what was counted or reserved
//! for it comes back.

use std::time::Duration;

use narad_shards::rt::sim::Rng;

use super::fake::delivery;
use super::*;

fn seeds() -> Vec<Vec<u8>> {
    let batch = br#"{"messages":[{"payload":{"a":[1,"x"]},"key":"k"},{"payload":"aGk=","payload_encoding":"base64","partition":1}]}"#;
    let packed = zstd::bulk::compress(batch, 3).expect("into memory");
    let chunked =
        format!("POST /v1/topics/t/produce HTTP/1.1\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n");
    vec![
        request("POST", "/v1/topics/t/produce?key=%6b&partition=1", JSON, b"payload"),
        request("POST", "/v1/topics/t/produce/batch", JSON, batch),
        request("POST", "/v1/topics/t/produce/batch", &format!("{JSON}Content-Encoding: zstd\r\n"), &packed),
        request("POST", "/v1/topics/t/produce/batch", JSON, &[b'['; 1_100_000]),
        request("GET", "/v1/topics/t/consume?wait=3s&max=2", "X-Narad-Client: x\r\n", b""),
        request("POST", "/v1/topics/t/ack?extend=0", JSON, br#"{"receipt_handles":["1:2:3","x"]}"#),
        request("POST", "/v1/topics", JSON, br#"{"name":"n","partitions":3,"retention_ms":0}"#),
        request("GET", "/v1/topics?limit=2&page_token=a", "", b""),
        request("HEAD", "/v1/topics/t", "Expect: 100-continue\r\n", b""),
        chunked.into_bytes(),
    ]
}

/// One connection's worth of bytes: requests cut together, with bytes flipped, dropped, doubled and made up.
fn draw(rng: &mut Rng, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..rng.range(1, 5) {
        let from = bytes.len();
        bytes.extend_from_slice(&seeds[rng.below(seeds.len() as u64) as usize]);
        for _ in 0..rng.below(4) {
            let at = rng.range(from as u64, bytes.len() as u64) as usize;
            // Damage lies in heads and short bodies, where it matters.
            let at = at.min(from + 300).min(bytes.len() - 1);
            match rng.below(5) {
                0 => bytes[at] ^= 1 << rng.below(8),
                1 => bytes[at] = rng.below(256) as u8,
                2 => drop(bytes.drain(at..(at + 3).min(bytes.len()))),
                3 => bytes.insert(at, b"\r\n:%&=[{\"0 \0\xff"[rng.below(13) as usize]),
                _ => bytes.truncate(at.max(from + 1)),
            }
        }
    }
    bytes
}

#[test]
fn connections_end_and_give_everything_back() {
    let seeds = seeds();
    for seed in 0..60 {
        let seeds = seeds.clone();
        rt::sim::run(seed, async move {
            let mut rng = Rng::new(seed);
            let world = World::new(HttpSettings::default(), NodeLimits::new(0, 2 << 20));
            world.broker().add_topic("t", 3);
            world.broker().produce_takes.set(Duration::from_millis(rng.below(20)));
            let mut clients = Vec::new();
            for offset in 0..4 {
                world.broker().ready.borrow_mut().push_back(vec![delivery(offset, b"k", b"\"v\"")]);
                let bytes = draw(&mut rng, &seeds);
                let mut rng = rng.fork();
                let mut client = world.connect_through(rng.range(1, 100_000) as usize);
                clients.push(rt::spawn(Queue::Foreground, async move {
                    let mut rest = &bytes[..];
                    while !rest.is_empty() {
                        let piece;
                        (piece, rest) = rest.split_at(rng.range(1, rest.len() as u64 + 1) as usize);
                        // Reads as it goes, or the server could not write; stops when the server has had enough.
                        let sent = rt::timeout(Duration::from_secs(40), client.end.write_all(piece)).await;
                        if !matches!(sent, Ok(Ok(()))) {
                            break;
                        }
                        rt::sim::jitter(&mut rng, Duration::from_millis(200)).await;
                    }
                    if rng.chance(1, 3) {
                        drop(client.end);
                        client.served.await;
                    } else {
                        client.closed().await;
                    }
                }));
            }
            let start = rt::now();
            for client in clients {
                client.await;
            }
            // The peers' ends closed; their connections have at most to hand leases back.
            rt::sleep(Duration::from_secs(61)).await;
            assert!(rt::now() - start < Duration::from_secs(600), "seed {seed}");
            assert_eq!(world.ctx.node.large_body_bytes_held(), 0, "seed {seed}");
            assert_eq!(world.broker().parked.get(), 0, "seed {seed}");
            assert_eq!(world.metric("narad_http_requests_in_flight").await, Some(1.0), "seed {seed}");
            let panics = world.metric("narad_errors_total{component=\"http\",kind=\"panic\"}").await;
            assert_eq!(panics, Some(0.0), "seed {seed}");
            let identity = world.ctx.node.in_flight(crate::http::limits::Identity::Ip(PEER));
            assert_eq!(Arc::strong_count(&identity), 1, "seed {seed}: a connection is still alive");
        });
    }
}

use std::time::Duration;

use super::*;
use crate::http::{Readiness, Surface};

const GUARD: &str = "{\"error\":\"state-changing requests must send Content-Type: application/json or \
                     application/octet-stream, or an X-Narad-Client header\"}\n";

#[test]
fn the_first_failing_check_answers() {
    run(|world| async move {
        for (method, target, headers, status, body) in [
            // The guard comes before route and method, and does not look at GET and DELETE.
            ("POST", "/v1/topics/t/produce", "", 415, GUARD),
            ("POST", "/nowhere", "Content-Type: text/plain\r\n", 415, GUARD),
            ("PUT", "/v1/topics/t", "Content-Type: application/x-www-form-urlencoded\r\n", 415, GUARD),
            ("PATCH", "/v1/topics/t", "X-Narad-Client: \r\n", 415, GUARD),
            ("POST", "/v1/topics/t/ack", "Content-Type: application/jsonp\r\n", 415, GUARD),
            ("POST", "/nowhere", JSON, 404, "404 page not found\n"),
            ("GET", "/nowhere", "", 404, "404 page not found\n"),
            ("GET", "/v1/topics/t/", "", 404, "404 page not found\n"),
            ("GET", "/v1/topics//consume", "", 404, "404 page not found\n"),
            ("GET", "/v1/topics/%zz/consume", "", 400, "400 Bad Request\n"),
            ("PUT", "/v1/topics/t", JSON, 405, "Method Not Allowed\n"),
            ("OPTIONS", "/v1/topics/t/produce", "", 405, "Method Not Allowed\n"),
            ("BREW", "/v1/topics/t/produce", "", 405, "Method Not Allowed\n"),
            ("DELETE", "/v1/topics/none", "", 404, "{\"error\":\"topic not found\"}\n"),
            (
                "POST",
                "/v1/topics/t/ack",
                "content-type: Application/JSON; charset=utf-8\r\n",
                400,
                "{\"error\":\"receipt_handle required\"}\n",
            ),
            (
                "POST",
                "/v1/topics/t/ack",
                "Content-Type: application/octet-stream\r\n",
                400,
                "{\"error\":\"receipt_handle required\"}\n",
            ),
            ("POST", "/v1/topics/t/ack", "X-Narad-Client: curl\r\n", 400, "{\"error\":\"receipt_handle required\"}\n"),
        ] {
            let answer = world.ask(method, target, headers, b"").await;
            answer.expect(status, body);
            if status == 404 && body.starts_with("404") {
                assert_eq!(answer.header("content-type"), Some("text/plain; charset=utf-8"));
            }
        }
        let answer = world.ask("PUT", "/v1/topics/t", JSON, b"").await;
        assert_eq!(answer.header("allow"), Some("DELETE, GET, HEAD, PATCH"));
    });
}

#[test]
fn routes_that_are_not_built_answer_501() {
    run(|world| async move {
        for (method, target, text) in [
            ("POST", "/v1/topics/t/children/c/pause", "remote children are not available on this node"),
            ("GET", "/v1/users", "users are not available on this node yet"),
            ("PUT", "/v1/users/u/password", "users are not available on this node yet"),
            ("POST", "/v1/cluster/members/x/decommission", "cluster management is not available on this node yet"),
            ("GET", "/v1/remotes", "remotes are not available on this node"),
            ("POST", "/v1/cluster/reencrypt-remotes", "remotes are not available on this node"),
        ] {
            let answer = world.ask(method, target, JSON, b"").await;
            answer.expect(501, &format!("{{\"error\":\"{text}\"}}\n"));
        }
        world.ask("GET", "/v1/cluster/moves", "", b"").await.expect(200, "{\"moves\":[]}\n");
    });
}

#[test]
fn routes_that_are_not_built_judge_their_bodies_first() {
    run(|world| async move {
        world.broker().add_topic("u", 3);
        let large = vec![b' '; (1 << 20) + 1];
        let fanout = "fan-out children are not available on this node yet";
        let not_json = "invalid json: the body is not one JSON value";
        for (method, target, body, status, text) in [
            ("POST", "/v1/topics/t/children", &b"{}"[..], 400, "child required"),
            ("POST", "/v1/topics/t/children", b"{\"child\":\"t\"}", 400, "a topic cannot be its own parent"),
            (
                "POST",
                "/v1/topics/t/children",
                b"{\"child\":\"u\",\"delay_ms\":-1}",
                400,
                "delay_ms must not be negative",
            ),
            ("POST", "/v1/topics/t/children", b"{\"child\":\"gone\"}", 404, "topic not found"),
            ("POST", "/v1/topics/gone/children", b"{\"child\":\"u\"}", 404, "topic not found"),
            ("POST", "/v1/topics/t/children", &large, 400, "request body too large"),
            ("POST", "/v1/topics/t/children", b"{\"child\":\"u\"}", 501, fanout),
            ("DELETE", "/v1/topics/t/children/u?force=x", b"", 400, "query parameter force must be true or false"),
            ("DELETE", "/v1/topics/t/children/u", b"", 404, "the topics are not linked"),
            ("DELETE", "/v1/topics/gone/children/u", b"", 404, "topic not found"),
            ("GET", "/v1/topics/gone/children", b"", 404, "topic not found"),
            ("GET", "/v1/topics/gone/schema", b"", 404, "topic not found"),
            ("POST", "/v1/users", b"{", 400, not_json),
            ("PUT", "/v1/users/u/grants", b"{} {}", 400, not_json),
            ("POST", "/v1/users", b"{\"username\":\"u\"}", 501, "users are not available on this node yet"),
            ("POST", "/v1/cluster/members/x/decommission", b"[", 400, not_json),
        ] {
            let answer = world.ask(method, target, JSON, body).await;
            answer.expect(status, &format!("{{\"error\":\"{text}\"}}\n"));
        }
        let none = "{\"topic\":\"t\",\"version\":0,\"versions\":[]}\n";
        world.ask("GET", "/v1/topics/t/schema", "", b"").await.expect(200, none);
        let none = "{\"parent\":\"t\",\"parent_id\":\"0000000000000abc\",\"children\":[]}\n";
        world.ask("GET", "/v1/topics/t/children?partitions=true", "", b"").await.expect(200, none);
    });
}

#[test]
fn health_and_readiness_are_judged_at_every_probe() {
    run(|world| async move {
        world.ask("GET", "/healthz", "", b"").await.expect(200, "{\"status\":\"ok\"}\n");
        world.ask("GET", "/readyz", "", b"").await.expect(200, "{\"status\":\"ready\"}\n");
        let head = world.ask("HEAD", "/readyz", "", b"").await;
        assert_eq!((head.status, head.header("content-length")), (200, Some("19")));
        world.broker().readiness.replace(Some(Readiness::Ready(vec!["raft_tls_certificate_expired"])));
        let degraded = "{\"status\":\"ready\",\"degraded\":[\"raft_tls_certificate_expired\"]}\n";
        world.ask("GET", "/readyz", "", b"").await.expect(200, degraded);
        let reason = "metastore: node is not ready: no raft leader known";
        world.broker().readiness.replace(Some(Readiness::NotReady(reason.to_owned())));
        world.ask("GET", "/readyz", "", b"").await.expect(503, &format!("{{\"error\":\"{reason}\"}}\n"));
        world.broker().shutting_down.set(true);
        world.ask("GET", "/healthz", "", b"").await.expect(503, "{\"error\":\"shutting down\"}\n");
    });
}

#[test]
fn k35_e51_until_it_was_caught_up_once_a_node_takes_no_request_and_stores_nothing() {
    run(|world| async move {
        world.broker().add_topic("t", 3);
        world.broker().behind.set(true);
        let refusal = "{\"error\":\"control plane temporarily unavailable\"}\n";
        for (method, target) in [
            ("POST", "/v1/topics/t/produce"),
            ("POST", "/v1/topics/t/produce/batch"),
            ("GET", "/v1/topics/t/consume"),
            ("POST", "/v1/topics/t/ack?receipt_handle=0:0:1"),
            ("POST", "/v1/topics"),
            ("PATCH", "/v1/topics/t"),
            ("DELETE", "/v1/topics/t"),
            ("GET", "/v1/topics/t"),
            ("GET", "/v1/topics"),
            ("GET", "/v1/cluster/members"),
        ] {
            let answer = world.ask(method, target, super::JSON, b"{}").await;
            assert_eq!(answer.header("retry-after"), Some("1"), "{method} {target}");
            answer.expect(503, refusal);
        }
        let broker = world.broker();
        assert!(broker.stored.borrow().is_empty() && broker.changes.borrow().is_empty());
        for probe in ["/healthz", "/readyz", "/metrics", "/v1/node/shards"] {
            assert_eq!(world.ask("GET", probe, "", b"").await.status, 200, "{probe}");
        }
        broker.behind.set(false);
        assert_eq!(world.ask("POST", "/v1/topics/t/produce", super::JSON, b"{}").await.status, 202);
    });
}

#[test]
fn n50_a_probe_listener_serves_probes_only() {
    let probes = HttpSettings { surface: Surface::Probes, ..HttpSettings::default() };
    run_with(probes, NodeLimits::new(0, 0), |world| async move {
        assert_eq!(world.ask("GET", "/metrics", "", b"").await.status, 200);
        assert_eq!(world.ask("GET", "/healthz", "", b"").await.status, 200);
        world.ask("GET", "/v1/topics", "", b"").await.expect(404, "404 page not found\n");
    });
    let api = HttpSettings { surface: Surface::Api { metrics: false }, ..HttpSettings::default() };
    run_with(api, NodeLimits::new(0, 0), |world| async move {
        world.ask("GET", "/metrics", "", b"").await.expect(404, "404 page not found\n");
    });
}

#[test]
fn e25_a_panic_is_contained() {
    run(|world| async move {
        world.broker().panics.set(true);
        let mut client = world.connect();
        let answer = client.ask("GET", "/v1/topics/t/consume", "", b"").await;
        answer.expect(500, "{\"error\":\"internal server panic\"}\n");
        world.broker().panics.set(false);
        let answer = client.ask("POST", "/v1/topics/t/produce", JSON, b"1").await;
        answer.expect(202, "");
        assert_eq!(world.metric("narad_errors_total{component=\"http\",kind=\"panic\"}").await, Some(1.0));
    });
}

#[test]
fn caps_are_counted_per_identity_and_node() {
    let settings = HttpSettings { consumes_in_flight_max: 10, produces_in_flight_max: 5, ..HttpSettings::default() };
    run_with(settings, NodeLimits::new(0, 0), |world| async move {
        let refused = "{\"error\":\"too many in-flight consume requests for this identity (limit 10 per node)\"}\n";
        let batch = "/v1/topics/t/consume?wait=5s&max=8";
        let (mut first, mut second, mut third) = (world.connect(), world.connect(), world.connect());
        first.send(&request("GET", batch, "X-Narad-Client: x\r\n", b"")).await;
        rt::sleep(Duration::from_millis(1)).await;
        // A cap comes before the handler looks at anything else, a missing topic included.
        second.ask("GET", "/v1/topics/none/consume?max=3", "X-Narad-Client: x\r\n", b"").await.expect(429, refused);
        second.send(&request("GET", "/v1/topics/t/consume?wait=5s", "", b"")).await;
        rt::sleep(Duration::from_millis(1)).await;
        third.ask("GET", "/v1/topics/t/consume?max=2", "X-Narad-Client: x\r\n", b"").await.expect(429, refused);
        assert_eq!(first.answer().await.map(|a| a.status), Some(204));
        assert_eq!(second.answer().await.map(|a| a.status), Some(204));
        // A batch above the cap counts as the cap.
        let alone = third.ask("GET", "/v1/topics/t/consume?max=100", "X-Narad-Client: x\r\n", b"").await;
        assert_eq!(alone.status, 204);

        let refused = "{\"error\":\"too many in-flight produce requests for this identity (limit 5 per node)\"}\n";
        world.broker().produce_takes.set(Duration::from_secs(1));
        first.send(&request("POST", "/v1/topics/t/produce", JSON, b"1")).await;
        rt::sleep(Duration::from_millis(1)).await;
        let batch = b"{\"messages\":[{\"payload\":1},{\"payload\":1},{\"payload\":1},{\"payload\":1},{\"payload\":1}]}";
        second.ask("POST", "/v1/topics/t/produce/batch", JSON, batch).await.expect(429, refused);
        assert_eq!(first.answer().await.map(|a| a.status), Some(202));
        second.ask("POST", "/v1/topics/t/produce/batch", JSON, batch).await.expect(202, "{\"accepted\":5}\n");
    });
}

#[test]
fn n45_labels_come_from_closed_sets() {
    run(|world| async move {
        for method in ["BREW", "X-1"] {
            world.ask(method, "/made/up", "", b"").await;
        }
        world.ask("POST", "/v1/topics/t/produce", JSON, b"hello").await.expect(202, "");
        world.ask("HEAD", "/v1/topics/t/consume", "", b"").await;
        world.ask("GET", "/v1/topics/none/consume?wait=1s", "", b"").await;
        for (series, value) in [
            ("narad_http_requests_total{route=\"unmatched\",method=\"other\",status=\"404\"}", 2.0),
            (
                "narad_http_requests_total{route=\"POST /v1/topics/{topic}/produce\",method=\"POST\",status=\"202\"}",
                1.0,
            ),
            ("narad_http_requests_total{route=\"GET /v1/topics/{topic}/consume\",method=\"HEAD\",status=\"204\"}", 1.0),
            ("narad_http_request_bytes_in_total{route=\"POST /v1/topics/{topic}/produce\"}", 5.0),
            ("narad_consume_empty_total{topic=\"t\"}", 1.0),
            ("narad_http_requests_in_flight", 1.0),
        ] {
            assert_eq!(world.metric(series).await, Some(value), "{series}");
        }
        assert_eq!(world.metric("narad_consume_empty_total{topic=\"none\"}").await, None);
        world.broker().topics.borrow_mut().remove("t");
        assert_eq!(world.metric("narad_consume_empty_total{topic=\"t\"}").await, None, "the topic is gone");
    });
}

#[test]
fn data_routes_name_the_shard_that_served_and_no_other_route_does() {
    let settings = HttpSettings { shard: Some(7), ..HttpSettings::default() };
    run_with(settings, NodeLimits::new(0, 0), |world| async move {
        // One connection: the header map of a request comes back as its answer's, and nothing of it may come along.
        let mut client = world.connect();
        for (method, target, headers, body, status, shard) in [
            ("POST", "/v1/topics/t/produce", "X-Narad-Client: a\r\nX-Odd: 1\r\n", &b"x"[..], 202, Some("7")),
            ("POST", "/v1/topics/t/produce", JSON, b"", 400, Some("7")),
            ("POST", "/v1/topics/t/produce/batch", JSON, b"[]", 400, Some("7")),
            ("GET", "/v1/topics/t/consume", "X-Odd: 1\r\n", b"", 204, Some("7")),
            ("POST", "/v1/topics/t/ack", JSON, b"", 400, Some("7")),
            ("GET", "/v1/topics/t", "", b"", 200, None),
            ("GET", "/v1/node/shards", "", b"", 200, None),
            ("GET", "/nowhere", "X-Odd: 1\r\n", b"", 404, None),
        ] {
            let answer = client.ask(method, target, headers, body).await;
            assert_eq!((answer.status, answer.header("x-narad-shard")), (status, shard), "{method} {target}");
            assert!(answer.header("x-odd").is_none() && answer.header("x-narad-client").is_none(), "{}", answer.head);
        }
    });
    // A listener of no shard names none.
    run(|world| async move {
        assert_eq!(world.ask("POST", "/v1/topics/t/produce", JSON, b"x").await.header("x-narad-shard"), None);
    });
}

#[test]
fn the_shards_are_shown_in_the_documented_fields() {
    run(|world| async move {
        let answer = world.ask("GET", "/v1/node/shards", "", b"").await;
        assert_eq!((answer.status, answer.header("content-type")), (200, Some("application/json")));
        let page: serde_json::Value = serde_json::from_str(answer.text()).unwrap();
        assert_eq!((&page["node"], &page["shards"][0]["cpu"]), (&"node-1".into(), &3.into()));
        let documented = include_str!("../../../docs/operating.md");
        let fields = |object: &serde_json::Value| object.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        for field in [fields(&page), fields(&page["shards"][0])].concat() {
            assert!(documented.contains(&format!("`{field}`")), "{field} is not in docs/operating.md");
        }
    });
}

#[test]
fn fields_of_remote_children_are_known_names() {
    run(|world| async move {
        let alone = "remote_topic, from, lanes and dry_run need a remote";
        let remote = "remote children are not available on this node";
        for (fields, status, text) in [
            ("\"remote_topic\":\"r\"", 400, alone),
            ("\"from\":\"attach\"", 400, alone),
            ("\"lanes\":2", 400, alone),
            ("\"dry_run\":false", 400, alone),
            ("\"remote\":\"r\"", 501, remote),
            ("\"remote\":\"r\",\"remote_topic\":\"q\",\"from\":\"earliest\",\"lanes\":2,\"dry_run\":true", 501, remote),
            ("\"fanout_delay_ms\":1", 400, "invalid json: json: unknown field \\\"fanout_delay_ms\\\""),
        ] {
            let body = format!("{{\"child\":\"elsewhere\",{fields}}}");
            let answer = world.ask("POST", "/v1/topics/t/children", JSON, body.as_bytes()).await;
            answer.expect(status, &format!("{{\"error\":\"{text}\"}}\n"));
        }
    });
}

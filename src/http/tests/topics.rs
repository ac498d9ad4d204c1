use narad_shards::api::{MetaReply, OwnerLiveness, PartitionReport, PartitionStats};

use super::*;

fn error(text: &str) -> String {
    format!("{{\"error\":\"{text}\"}}\n")
}

/// The members that the fake gives every topic, between its number of partitions and its end.
const SETTINGS: &str = "\"retention_ms\":604800000,\"visibility_timeout_ms\":30000,\
     \"max_in_flight_per_partition\":1024,\"max_acked_ahead_per_partition\":1024,\"created_at\":1700000000";

#[test]
fn create_fills_in_defaults_and_shows_no_role() {
    run(|world| async move {
        let body = b"{\"name\":\"orders.v1\",\"owner\":\"ignored\",\"partitions\":0,\"retention_ms\":null}";
        let created = format!("{{\"name\":\"orders.v1\",\"id\":\"0000000000000abc\",\"partitions\":3,{SETTINGS}}}\n");
        world.ask("POST", "/v1/topics", JSON, body).await.expect(201, &created);
        let body = b"{\"name\":\"a\",\"partitions\":108,\"retention_ms\":0,\"visibility_timeout_ms\":1,\
                      \"max_in_flight_per_partition\":2,\"max_acked_ahead_per_partition\":3}";
        let created = "{\"name\":\"a\",\"id\":\"0000000000000abc\",\"partitions\":108,\"retention_ms\":0,\
                       \"visibility_timeout_ms\":1,\"max_in_flight_per_partition\":2,\
                       \"max_acked_ahead_per_partition\":3,\"created_at\":1700000000}\n";
        world.ask("POST", "/v1/topics", JSON, body).await.expect(201, created);
    });
}

const MAYBE_APPLIED: &str =
    "control plane temporarily unavailable: the change may still be applied, read it back before \
     retrying: x";

#[test]
fn refusals_of_a_create() {
    run(|world| async move {
        let name = "a topic name holds only A-Z a-z 0-9 . _ -";
        let too_long = "a topic name has at most 200 characters, this one has 201";
        let long = format!("{{\"name\":\"{}\"}}", "n".repeat(201));
        let large = format!("{{\"name\":\"{}\"}}", "n".repeat(1 << 20));
        let retention = "retention_ms must be 0 (forever) or at least 3600000";
        for (body, status, text) in [
            ("", 400, "invalid json: EOF while parsing a value"),
            ("{}", 400, "name required"),
            ("{\"name\":\"\"}", 400, "name required"),
            ("{\"name\":\"a b\"}", 400, name),
            ("{\"name\":\"..\"}", 400, "\\\"..\\\" is no topic name"),
            ("{\"name\":\"\u{e9}\"}", 400, name),
            (&long, 400, too_long),
            (&large, 413, "request body too large"),
            ("{\"name\":\"a\",\"Partitions\":3}", 400, "invalid json: json: unknown field \\\"Partitions\\\""),
            ("{\"name\":\"a\"} {", 400, "invalid json: more than one value in the body"),
            ("{\"name\":7}", 400, "invalid json: invalid type: integer `7`, expected a string"),
            ("{\"name\":\"a\",\"partitions\":2}", 400, "partitions must be between 3 and 108"),
            ("{\"name\":\"a\",\"partitions\":109}", 400, "partitions must be between 3 and 108"),
            ("{\"name\":\"a\",\"partitions\":-3}", 400, "partitions must not be negative"),
            ("{\"name\":\"a\",\"retention_ms\":3599999}", 400, retention),
            ("{\"name\":\"a\",\"retention_ms\":-1}", 400, "retention_ms must not be negative"),
            ("{\"name\":\"a\",\"visibility_timeout_ms\":-1}", 400, "visibility_timeout_ms must not be negative"),
            (
                "{\"name\":\"a\",\"max_in_flight_per_partition\":-1}",
                400,
                "max_in_flight_per_partition must not be negative",
            ),
            ("{\"name\":\"a\",\"fanout_delay_ms\":1}", 400, "fanout_delay_ms needs a parent"),
            (
                "{\"name\":\"a\",\"parent\":\"p\",\"fanout_delay_ms\":31536000001}",
                400,
                "fanout_delay_ms must be at most 31536000000",
            ),
            ("{\"name\":\"a\",\"parent\":\"a\"}", 400, "a topic cannot be its own parent"),
            ("{\"name\":\"a\",\"schema\":null}", 400, "schema must be a JSON object or true"),
            ("{\"name\":\"a\",\"schema\":[]}", 400, "schema must be a JSON object or true"),
            ("{\"name\":\"a\",\"schema\":{\"type\":\"object\"}}", 501, "schemas are not available on this node yet"),
            ("{\"name\":\"a\",\"parent\":\"t\"}", 501, "fan-out children are not available on this node yet"),
            ("{\"name\":\"a\",\"parent\":\"gone\"}", 404, "topic not found"),
        ] {
            world.ask("POST", "/v1/topics", JSON, body.as_bytes()).await.expect(status, &error(text));
        }
        assert!(world.broker().changes.borrow().is_empty());

        for (reply, status, text, retry) in [
            (MetaReply::Exists, 409, "topic \\\"a\\\" already exists", None),
            (
                MetaReply::CaseCollision { existing: "A".to_owned() },
                409,
                "topic name \\\"a\\\" differs only in letter case from existing topic \\\"A\\\"",
                None,
            ),
            (MetaReply::Unavailable("x".to_owned()), 503, "control plane temporarily unavailable", Some("1")),
            (MetaReply::Unknown("x".to_owned()), 503, MAYBE_APPLIED, None),
            (MetaReply::NotGone, 500, "create topic failed", None),
        ] {
            world.broker().change_replies.borrow_mut().push_back(reply);
            let answer = world.ask("POST", "/v1/topics", JSON, b"{\"name\":\"a\"}").await;
            answer.expect(status, &error(text));
            assert_eq!(answer.header("retry-after"), retry);
        }
    });
}

#[test]
fn listing_pages_in_name_order() {
    run(|world| async move {
        world.broker().add_topic("a", 3);
        world.broker().add_topic("b", 3);
        let topic = |name: &str| {
            format!("{{\"name\":\"{name}\",\"id\":\"0000000000000abc\",\"partitions\":3,{SETTINGS},\"role\":\"standalone\"}}")
        };
        let page = |token: &str, names: &[&str]| {
            let topics: Vec<String> = names.iter().map(|name| topic(name)).collect();
            format!("{{\"next_page_token\":\"{token}\",\"topics\":[{}]}}\n", topics.join(","))
        };
        for (query, expected) in [
            ("", page("", &["a", "b", "t"])),
            ("?limit=3", page("", &["a", "b", "t"])),
            ("?limit=2", page("b", &["a", "b"])),
            ("?limit=2&page_token=b", page("", &["t"])),
            ("?page_token=a%20&limit=99999999999", page("", &["b", "t"])),
            ("?page_token=zz", page("", &[])),
        ] {
            world.ask("GET", &format!("/v1/topics{query}"), "", b"").await.expect(200, &expected);
        }
        for limit in ["", "0", "-1", "x", "1.5"] {
            assert_eq!(world.ask("GET", &format!("/v1/topics?limit={limit}"), "", b"").await.status, 400, "{limit}");
        }
    });
}

#[test]
fn http_api_9_2_details_name_each_owner_and_show_a_placeholder_for_one_that_does_not_answer() {
    run(|world| async move {
        let stats = |index| PartitionStats {
            index,
            segments: 1,
            oldest_offset: 2,
            next_offset: 9,
            high_watermark: 8,
            size_bytes: 4096,
            oldest_segment_at: (index == 0).then_some(1_700_000_000),
            ..PartitionStats::default()
        };
        let head = format!(
            "{{\"name\":\"t\",\"id\":\"0000000000000abc\",\"partitions\":3,{SETTINGS},\"role\":\"standalone\",\
             \"schema_version\":0,\"partition_stats\":["
        );
        let known = |index: u32, owner: &str| {
            let oldest = if index == 0 { "\"oldest_segment_at\":1700000000," } else { "" };
            format!(
                "{{\"index\":{index},\"segments\":1,\"oldest_offset\":2,\"next_offset\":9,\"high_watermark\":8,\
                 \"size_bytes\":4096,{oldest}\"owner_node\":\"{owner}\",\"status\":\"ok\"}}"
            )
        };
        let unknown = |index: u32, owner: &str, liveness: &str| {
            format!(
                "{{\"index\":{index},\"segments\":0,\"oldest_offset\":0,\"next_offset\":0,\"high_watermark\":0,\
                 \"size_bytes\":0,\"owner_node\":\"{owner}\",\"status\":\"owner_unavailable\",\
                 \"owner_liveness\":\"{liveness}\"}}"
            )
        };
        let owned = |index, owner: Option<&str>, stats| {
            let owner_node = owner.map(std::sync::Arc::from);
            PartitionReport { index, owner_node, stats }
        };
        let here = |index| owned(index, None, Ok(stats(index)));
        world.broker().reports.replace(vec![here(0), owned(1, Some("b"), Ok(stats(1))), here(2)]);
        let all = format!("{head}{},{},{}]}}\n", known(0, "node-1"), known(1, "b"), known(2, "node-1"));
        world.ask("GET", "/v1/topics/t", "", b"").await.expect(200, &all);
        let one = format!("{head}{}]}}\n", known(1, "b"));
        world.ask("GET", "/v1/topics/t?partition=1", "", b"").await.expect(200, &one);
        for (owner, liveness, word) in [
            ("c", OwnerLiveness::Dead, "dead"),
            ("c", OwnerLiveness::Unreachable, "unreachable"),
            ("", OwnerLiveness::Unknown, "unknown"),
            ("", OwnerLiveness::Unassigned, "unassigned"),
        ] {
            world.broker().reports.replace(vec![here(0), here(1), owned(2, Some(owner), Err(liveness))]);
            let (first, second, third) = (known(0, "node-1"), known(1, "node-1"), unknown(2, owner, word));
            let some = format!("{head}{first},{second},{third}],\"partial\":true}}\n");
            world.ask("GET", "/v1/topics/t", "", b"").await.expect(200, &some);
            let none = format!("{head}{third}],\"partial\":true}}\n");
            world.ask("GET", "/v1/topics/t?partition=2", "", b"").await.expect(200, &none);
        }
        let range = error("invalid argument: partition out of range");
        world.ask("GET", "/v1/topics/t?partition=3", "", b"").await.expect(400, &range);
        world.ask("GET", "/v1/topics/none", "", b"").await.expect(404, &error("topic not found"));
    });
}

#[test]
fn delete_reads_a_recreated_topic_again_once() {
    run(|world| async move {
        let path = "/v1/topics/t";
        world.ask("DELETE", path, "", b"").await.expect(204, "");
        world.broker().change_replies.borrow_mut().extend([MetaReply::Changed, MetaReply::Deleted]);
        world.ask("DELETE", "/v1/topics/t?force=true", "", b"").await.expect(204, "");
        world.broker().change_replies.borrow_mut().extend([MetaReply::Changed, MetaReply::Changed]);
        world.ask("DELETE", path, "", b"").await.expect(409, &error("topic changed since it was read"));
        world.broker().change_replies.borrow_mut().push_back(MetaReply::NotFound);
        world.ask("DELETE", path, "", b"").await.expect(404, &error("topic not found"));
        world.broker().change_replies.borrow_mut().push_back(MetaReply::Unavailable("x".to_owned()));
        world.ask("DELETE", path, "", b"").await.expect(503, &error("control plane temporarily unavailable"));
        let force = error("query parameter force must be true or false");
        for value in ["1", "", "TRUE"] {
            world.ask("DELETE", &format!("/v1/topics/t?force={value}"), "", b"").await.expect(400, &force);
        }
        world.ask("DELETE", "/v1/topics/none", "", b"").await.expect(404, &error("topic not found"));
        assert_eq!(world.broker().changes.borrow().len(), 7);
    });
}

#[test]
fn alter_applies_its_groups_in_order_and_shows_the_topic() {
    run(|world| async move {
        let topic = |partitions: u32, retention: u64, in_flight: u64, ahead: u64| {
            format!(
                "{{\"name\":\"t\",\"id\":\"0000000000000abc\",\"partitions\":{partitions},\"retention_ms\":{retention},\
                 \"visibility_timeout_ms\":30000,\"max_in_flight_per_partition\":{in_flight},\
                 \"max_acked_ahead_per_partition\":{ahead},\"created_at\":1700000000,\"role\":\"standalone\"}}\n"
            )
        };
        let patch = |body: &'static str| world.ask("PATCH", "/v1/topics/t", JSON, body.as_bytes());
        patch("{\"retention_ms\":0}").await.expect(200, &topic(3, 0, 1024, 1024));
        patch("{\"max_in_flight_per_partition\":7,\"retention_ms\":null}").await.expect(200, &topic(3, 0, 7, 1024));
        let all = "{\"partitions\":5,\"max_in_flight_per_partition\":0,\"max_acked_ahead_per_partition\":9,\
                   \"retention_ms\":3600000}";
        patch(all).await.expect(200, &topic(5, 3_600_000, 1024, 9));
        // The first failure answers; what came before it stays.
        let answer = patch("{\"partitions\":5,\"retention_ms\":7200000}").await;
        answer.expect(400, &error("partitions must be more than the topic has, which is 5"));
        patch("{\"max_in_flight_per_partition\":1}").await.expect(200, &topic(5, 7_200_000, 1, 9));
        // Caps have no upper bound, and none is cut to 32 bits.
        let (in_flight, ahead) = ((1 << 32) + 1, i64::MAX as u64);
        let caps = "{\"max_in_flight_per_partition\":4294967297,\"max_acked_ahead_per_partition\":9223372036854775807}";
        patch(caps).await.expect(200, &topic(5, 7_200_000, in_flight, ahead));
        let more = patch("{\"max_in_flight_per_partition\":9223372036854775808}").await;
        assert_eq!(more.status, 400, "{}", more.text());
    });
}

#[test]
fn refusals_of_an_alter_change_nothing() {
    run(|world| async move {
        let retention = "retention_ms must be 0 (forever) or at least 3600000";
        for (body, status, text) in [
            ("", 400, "invalid json: EOF while parsing a value"),
            ("{}", 400, "nothing to change"),
            ("{\"retention_ms\":null}", 400, "nothing to change"),
            ("{\"visibility_timeout_ms\":5}", 400, "invalid json: json: unknown field \\\"visibility_timeout_ms\\\""),
            ("{\"retention_ms\":3599999}", 400, retention),
            ("{\"retention_ms\":-1}", 400, "retention_ms must not be negative"),
            ("{\"partitions\":0}", 400, "partitions must be between 3 and 108"),
            ("{\"retention_ms\":0,\"partitions\":109}", 400, "partitions must be between 3 and 108"),
            ("{\"schema_base_version\":1}", 400, "schema_base_version needs a schema"),
            ("{\"schema\":null}", 400, "schema must be a JSON object or true"),
            ("{\"retention_ms\":0,\"schema\":{}}", 501, "schemas are not available on this node yet"),
        ] {
            world.ask("PATCH", "/v1/topics/t", JSON, body.as_bytes()).await.expect(status, &error(text));
        }
        assert!(world.broker().changes.borrow().is_empty());
        let body = b"{\"retention_ms\":0}";
        for body in [&body[..], b"{\"schema\":true}"] {
            world.ask("PATCH", "/v1/topics/gone", JSON, body).await.expect(404, &error("topic not found"));
        }
        for (replies, status, text) in [
            (vec![MetaReply::Changed, MetaReply::Changed], 409, "topic changed since it was read"),
            (vec![MetaReply::Unavailable("x".to_owned())], 503, "control plane temporarily unavailable"),
            (vec![MetaReply::Unknown("x".to_owned())], 503, MAYBE_APPLIED),
        ] {
            world.broker().change_replies.borrow_mut().extend(replies);
            world.ask("PATCH", "/v1/topics/t", JSON, body).await.expect(status, &error(text));
        }
    });
}

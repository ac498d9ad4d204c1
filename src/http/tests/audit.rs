use std::time::Duration;

use narad_shards::api::{MemberStatus, MetaReply, NodeStatus, Quarantined};

use super::*;
use crate::config::{LogFormat, LogLevel};
use crate::telemetry::logged;

/// The audit lines that a test causes, without their first fields, which are always the same.
fn audited<F: Future<Output = ()> + 'static>(test: impl FnOnce(World) -> F + 'static) -> Vec<String> {
    let lines = logged(LogLevel::Info, LogFormat::Text, || run(test));
    let lines = lines.iter().filter_map(|line| {
        let (head, rest) = line.split_once(" msg=audit component=audit ")?;
        let level = head.rsplit_once("level=")?.1;
        Some(format!("{level} {rest}"))
    });
    lines.collect()
}

#[test]
fn operations_8_every_change_leaves_its_outcome() {
    let lines = audited(|world| async move {
        let replies = |all: Vec<MetaReply>| world.broker().change_replies.borrow_mut().extend(all);
        let unavailable = || MetaReply::Unavailable("x".to_owned());
        let unknown = || MetaReply::Unknown("x".to_owned());
        let create = || world.ask("POST", "/v1/topics", JSON, b"{\"name\":\"a\"}");
        assert_eq!(create().await.status, 201);
        replies(vec![MetaReply::Exists, unavailable(), unknown()]);
        assert_eq!((create().await.status, create().await.status, create().await.status), (409, 503, 503));
        let delete = |path| world.ask("DELETE", path, "", b"");
        replies(vec![MetaReply::Changed, MetaReply::Deleted, unknown()]);
        assert_eq!(delete("/v1/topics/t").await.status, 204);
        assert_eq!(delete("/v1/topics/t").await.status, 503);
        assert_eq!(delete("/v1/topics/gone").await.status, 404);
    });
    let expected = [
        "INFO event=topic.create actor=\"\" target=a status=201 outcome=ok",
        "INFO event=topic.create actor=\"\" target=a status=409 outcome=rejected",
        "INFO event=topic.create actor=\"\" target=a status=503 outcome=failed",
        "INFO event=topic.create actor=\"\" target=a status=503 outcome=unknown",
        "INFO event=topic.delete actor=\"\" target=t status=204 outcome=ok incarnation=0000000000000abc",
        "INFO event=topic.delete actor=\"\" target=t status=503 outcome=unknown incarnation=0000000000000abc",
        "INFO event=topic.delete actor=\"\" target=gone status=404 outcome=rejected",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn operations_8_fields_of_one_alter_with_different_outcomes_have_lines_of_their_own() {
    let lines = audited(|world| async move {
        let patch = |path, body: &'static str| world.ask("PATCH", path, JSON, body.as_bytes());
        let caps = "{\"partitions\":4,\"max_in_flight_per_partition\":7,\"max_acked_ahead_per_partition\":8}";
        assert_eq!(patch("/v1/topics/t", caps).await.status, 200);
        assert_eq!(patch("/v1/topics/t", "{\"partitions\":4,\"retention_ms\":0}").await.status, 400);
        assert_eq!(patch("/v1/topics/gone", "{\"partitions\":4,\"retention_ms\":0}").await.status, 404);
    });
    let expected = [
        "INFO event=topic.alter actor=\"\" target=t status=200 outcome=ok \
         fields=max_in_flight_per_partition,max_acked_ahead_per_partition,partitions",
        "INFO event=topic.alter actor=\"\" target=t status=200 outcome=ok fields=retention_ms",
        "INFO event=topic.alter actor=\"\" target=t status=400 outcome=rejected fields=partitions",
        "INFO event=topic.alter actor=\"\" target=gone status=404 outcome=rejected fields=retention_ms,partitions",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn http_api_21_1_members_are_listed_as_this_node_sees_them() {
    run(|world| async move {
        let member = |id: &str, alive| MemberStatus {
            id: id.to_owned(),
            address: format!("{id}:7942"),
            alive,
            draining: !alive,
            owned_partitions: 3,
            voter: alive,
            leader: alive,
            heartbeat_age_seconds: 4,
            node_status: None,
        };
        let reply = MetaReply::Members(vec![member("a", true), member("b", false)]);
        world.broker().change_replies.borrow_mut().push_back(reply);
        let answer = world.ask("GET", "/v1/cluster/members", "", b"").await;
        let shown = |id, alive: bool, status| {
            format!(
                "{{\"id\":\"{id}\",\"addr\":\"{id}:7942\",\"status\":\"{status}\",\"draining\":{},\"owned_partitions\":3,\
                 \"outbound_moves\":0,\"voter\":{alive},\"leader\":{alive},\"heartbeat_age_seconds\":4}}",
                !alive
            )
        };
        let expected = format!("{{\"members\":[{},{}]}}\n", shown("a", true, "alive"), shown("b", false, "dead"));
        answer.expect(200, &expected);
        let copy = Quarantined {
            topic: "t".to_owned(),
            directory: "topics/t.stale-00000000000000aa".to_owned(),
            bytes: 9,
            modified_at: 1_700_000_000,
        };
        let status = NodeStatus {
            node: "a".to_owned(),
            produce_in_flight: 1,
            dispatch_backlog: 2,
            quarantined_copies: 1,
            quarantined_bytes: 9,
            quarantined: vec![copy],
            ..NodeStatus::default()
        };
        let said = [("a", Ok(status)), ("b", Err("it did not answer".to_owned()))];
        let members = said.map(|(id, said)| MemberStatus { node_status: Some(said), ..member(id, true) });
        world.broker().change_replies.borrow_mut().push_back(MetaReply::Members(members.into()));
        let detailed = world.ask("GET", "/v1/cluster/members?detail=true", "", b"").await;
        for part in [
            "\"node_status\":{\"node\":\"a\",\"draining\":false,\"produce_in_flight\":1,\"dispatch_backlog\":2,\
             \"quarantine\":{\"copies\":1,\"bytes\":9,\"list\":[{\"kind\":\"topic_incarnation\",\"topic\":\"t\",\"partition\":-1,\
             \"dir\":\"topics/t.stale-00000000000000aa\",\"bytes\":9,\"mod_time\":1700000000}]},\"moves\":[]}",
            "\"status_error\":\"it did not answer\"",
        ] {
            assert!(detailed.text().contains(part), "{}", detailed.text());
        }
        assert_eq!(world.ask("GET", "/v1/cluster/members?detail=2", "", b"").await.status, 400);
    });
}

#[test]
fn http_api_21_6_a_forget_answers_and_is_audited() {
    let lines = audited(|world| async move {
        let forget = || world.ask("POST", "/v1/cluster/members/n4/forget", JSON, b"");
        forget().await.expect(200, "{\"id\":\"n4\",\"voter\":true}\n");
        let refused = MetaReply::Refused { status: 409, why: "\"n4\" has a member record".to_owned() };
        let unavailable = MetaReply::Unavailable("no leader".to_owned());
        world.broker().change_replies.borrow_mut().extend([refused, unavailable, MetaReply::Unknown("x".to_owned())]);
        forget().await.expect(409, "{\"error\":\"\\\"n4\\\" has a member record\"}\n");
        assert_eq!((forget().await.status, forget().await.status), (503, 503));
    });
    let expected = ["200 outcome=ok", "409 outcome=rejected", "503 outcome=failed", "503 outcome=unknown"];
    assert_eq!(lines, expected.map(|end| format!("INFO event=cluster.forget actor=\"\" target=n4 status={end}")));
}

#[test]
fn operations_8_a_client_that_leaves_does_not_take_its_line_along() {
    let lines = audited(|world| async move {
        world.broker().change_takes.set(Duration::from_secs(5));
        let mut client = world.connect();
        client.send(&request("POST", "/v1/topics", JSON, b"{\"name\":\"a\"}")).await;
        rt::sleep(Duration::from_secs(1)).await;
        drop(client.end);
        client.served.await;
    });
    assert_eq!(lines, ["INFO event=topic.create actor=\"\" target=a status=499 outcome=unknown"]);
}

#[test]
fn operations_8_what_falls_earlier_leaves_no_line() {
    let lines = audited(|world| async move {
        for (method, path, body) in [
            ("POST", "/v1/topics", "{"),
            ("POST", "/v1/topics", "{\"name\":\"a\",\"partitions\":1}"),
            ("PATCH", "/v1/topics/t", "{}"),
            ("DELETE", "/v1/topics/t?force=1", ""),
        ] {
            assert_eq!(world.ask(method, path, JSON, body.as_bytes()).await.status, 400, "{method} {body}");
        }
        assert_eq!(world.ask("GET", "/v1/topics/t?partition=0", "", b"").await.status, 200);
    });
    assert!(lines.is_empty(), "{lines:?}");
}

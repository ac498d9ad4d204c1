use narad_shards::api::{Settle, SettleMode, SettleStatus};

use super::*;

const PATH: &str = "/v1/topics/t/ack";
const GONE: &str = "receipt handle no longer matches an active reservation";
const UNANSWERED: &str = "the partition owner did not answer; the ack may have been applied; retry";

fn error(text: &str) -> String {
    format!("{{\"error\":\"{text}\"}}\n")
}

#[test]
fn three_modes_of_one_handle() {
    run(|world| async move {
        for (extend, mode) in [
            ("", SettleMode::Ack),
            ("&extend=false", SettleMode::Ack),
            ("&extend=true", SettleMode::Extend),
            ("&extend=1", SettleMode::Extend),
            ("&extend=0", SettleMode::Nack),
        ] {
            // A body beside the handle is ignored, whatever it is.
            let answer =
                world.ask("POST", &format!("{PATH}?receipt_handle=1%3A2%3A3{extend}"), JSON, b"{nonsense").await;
            answer.expect(204, "");
            let settle = Settle { partition: 1, offset: 2, nonce: 3, mode };
            assert_eq!(world.broker().settled.take(), [settle]);
        }
    });
}

#[test]
fn refusals_of_one_handle() {
    run(|world| async move {
        let extend = error("query parameter extend must be true, false, 1 or 0");
        for (target, status, text) in [
            (PATH, 400, error("receipt_handle required")),
            ("/v1/topics/t/ack?receipt_handle=", 400, error("receipt_handle required")),
            ("/v1/topics/t/ack?receipt_handle=1:2", 400, error("invalid receipt_handle")),
            // The handle is judged before the topic is looked up.
            ("/v1/topics/none/ack?receipt_handle=x", 400, error("invalid receipt_handle")),
            ("/v1/topics/none/ack?receipt_handle=1:2:3", 404, error("topic not found")),
            ("/v1/topics/t/ack?receipt_handle=1:2:3&extend=yes", 400, extend.clone()),
            // What a script with an unset variable sends must not settle the message.
            ("/v1/topics/t/ack?receipt_handle=1:2:3&extend=", 400, extend),
        ] {
            world.ask("POST", target, JSON, b"").await.expect(status, &text);
        }
        for (outcome, status, text, retry) in [
            (SettleStatus::LeaseGone, 410, error(GONE), None),
            (SettleStatus::NotOwner, 421, error("this node does not own the requested partition"), None),
            (SettleStatus::Unanswered, 502, format!("{UNANSWERED}\n"), None),
            (SettleStatus::OwnerDown, 503, "partition owner is down; retry later\n".to_owned(), Some("1")),
        ] {
            world.broker().statuses.borrow_mut().push_back(outcome);
            let answer = world.ask("POST", "/v1/topics/t/ack?receipt_handle=1:2:3", JSON, b"").await;
            answer.expect(status, &text);
            assert_eq!(answer.header("retry-after"), retry);
        }
    });
}

#[test]
fn a_batch_answers_for_each_handle() {
    run(|world| async move {
        use SettleStatus::*;
        world.broker().statuses.borrow_mut().extend([Done, LeaseGone, NotOwner, Unanswered, OwnerDown]);
        let body = br#"{"receipt_handles":["1:1:1","bad","1:2:1","1:3:1","1:4:1","\u0031:5:1"]}"#;
        let results = format!(
            "{{\"results\":[{{\"status\":204}},{{\"status\":400,\"error\":\"invalid receipt_handle\"}},\
             {{\"status\":410,\"error\":\"{GONE}\"}},\
             {{\"status\":421,\"error\":\"this node does not own the requested partition\"}},\
             {{\"status\":502,\"error\":\"{UNANSWERED}\"}},\
             {{\"status\":503,\"error\":\"partition owner is down; retry later\"}}]}}\n"
        );
        world.ask("POST", "/v1/topics/t/ack?extend=0", JSON, body).await.expect(200, &results);
        let settled = world.broker().settled.take();
        assert!(settled.len() == 5 && settled.iter().all(|s| s.mode == SettleMode::Nack), "{settled:?}");
    });
}

#[test]
fn refusals_of_a_batch() {
    run(|world| async move {
        let many = |count: usize| format!("{{\"receipt_handles\":[{}]}}", vec!["\"1:1:1\""; count].join(","));
        let large = format!("{{\"receipt_handles\":[\"{}\"]}}", "1".repeat(64 << 10));
        let trailing = many(1) + " []";
        let (hundred, too_many) = (many(100), many(101));
        // Broken JSON behind the hundredth handle is never looked at.
        let cut = hundred.trim_end_matches("]}").to_owned() + ",\"x";
        for (target, body, status, text) in [
            (PATH, "{}", 400, "receipt_handles required"),
            (PATH, "{\"receipt_handles\":[]}", 400, "receipt_handles required"),
            (PATH, "{\"receipt_handles\":[1]}", 400, "invalid json: invalid type: integer `1`, expected a string"),
            (
                PATH,
                "{\"receipt_handles\":\"1:1:1\"}",
                400,
                "invalid json: invalid type: string \\\"1:1:1\\\", expected an array",
            ),
            (PATH, "{\"handles\":[]}", 400, "invalid json: json: unknown field \\\"handles\\\""),
            (PATH, "nope", 400, "invalid json: expected ident"),
            (PATH, &trailing, 400, "invalid json: more than one value in the body"),
            (PATH, &too_many, 400, "too many receipt_handles: more than 100"),
            (PATH, &cut, 400, "too many receipt_handles: more than 100"),
            (PATH, &large, 413, "request body too large"),
            ("/v1/topics/none/ack", &hundred, 404, "topic not found"),
            ("/v1/topics/none/ack", "{\"receipt_handles\":[\"x\"]}", 404, "topic not found"),
        ] {
            world.ask("POST", target, JSON, body.as_bytes()).await.expect(status, &error(text));
        }
        assert!(world.broker().settled.borrow().is_empty());
        assert_eq!(world.ask("POST", PATH, JSON, hundred.as_bytes()).await.status, 200);
    });
}

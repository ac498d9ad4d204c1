//! Commands against a scripted server: what is sent, what is printed, how it ends.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::thread::JoinHandle;
use std::time::Duration;

use argh::FromArgs;

use super::client::{Endpoint, Request};
use super::*;

/// A request as the server saw it.
#[derive(Debug)]
pub(super) struct Seen {
    head: String,
    body: Vec<u8>,
    connection: usize,
}

/// Answers requests with the given texts, in order; a text that ends in `!` closes the connection behind it.
fn server(answers: Vec<String>) -> (Client, JoinHandle<Vec<Seen>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = Client::new(Endpoint::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap());
    let thread = std::thread::spawn(move || {
        let mut answers = answers.into_iter().peekable();
        let mut seen = Vec::new();
        let mut connection = 0;
        while answers.peek().is_some() {
            let (stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream);
            connection += 1;
            while let Some(answer) = answers.peek() {
                let Some((head, body)) = read_request(&mut reader) else { break };
                seen.push(Seen { head, body, connection });
                let close = answer.ends_with('!');
                reader.get_mut().write_all(answer.trim_end_matches('!').as_bytes()).unwrap();
                answers.next();
                if close {
                    break;
                }
            }
        }
        seen
    });
    (client, thread)
}

fn read_request(reader: &mut impl BufRead) -> Option<(String, Vec<u8>)> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    let length =
        head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).map_or(0, |text| text.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((head, body))
}

pub(super) fn answer(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// How a broker accepts one message.
fn stored() -> String {
    "HTTP/1.1 202 Accepted\r\nX-Narad-Shard: 0\r\nContent-Length: 0\r\n\r\n".to_owned()
}

fn empty(status: &str) -> String {
    format!("HTTP/1.1 {status}\r\n\r\n")
}

pub(super) struct Outcome {
    pub result: Result<(), Failure>,
    pub out: String,
    err: String,
    pub seen: Vec<Seen>,
}

/// Runs one command line against scripted answers.
pub(super) fn narad(args: &[&str], input: &str, answers: Vec<String>) -> Outcome {
    let (client, thread) = server(answers);
    let args = normalise(args.iter().map(|arg| (*arg).to_owned()).collect());
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let parsed = Narad::from_args(&["narad"], &args).unwrap();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut input = input.as_bytes();
    let result = {
        let mut client = client;
        match parsed.command {
            Command::Topic(command) => topic::run(command, &mut client, &mut input, &mut out, &mut err),
            Command::Cluster(command) => cluster::run(command, &mut client, &mut out),
            Command::Pub(command) => publish::run(command, &mut client, &mut input, &mut err),
            Command::Sub(command) => subscribe::run(command, &mut client, &mut out, &mut err),
            Command::Server(serve::Server { command: serve::ServerCommand::Report(_) }) => {
                report::run(&mut client, &mut out)
            }
            Command::Replay(command) => replay::run(command, &mut client, &mut out, &mut err),
            Command::Top(command) => top::run(command, client, &mut out),
            other => panic!("not a client command: {other:?}"),
        }
    };
    let text = |bytes| String::from_utf8(bytes).unwrap();
    // Wrong usage sends nothing: that server waits for ever.
    let seen = if matches!(result, Err(Failure::Usage(_))) { Vec::new() } else { thread.join().unwrap() };
    Outcome { result, out: text(out), err: text(err), seen }
}

pub(super) fn first_line(seen: &Seen) -> &str {
    seen.head.lines().next().unwrap_or("")
}

pub(super) fn failure(outcome: Outcome) -> String {
    match outcome.result {
        Err(Failure::Request(text)) => text,
        other => panic!("{other:?}"),
    }
}

#[test]
fn arguments_are_understood_as_people_write_them() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["topics", "ls"], &["topic", "ls"]),
        (&["ctx", "add", "a", "--server", "h:1"], &["--server", "h:1", "ctx", "add", "a"]),
        (&["topic", "ls", "--ctx=a"], &["--ctx", "a", "topic", "ls"]),
        (&["--version"], &["version"]),
        (&["-s", "h", "-V"], &["-s", "h", "version"]),
        (&["pub", "t", "--version"], &["pub", "t", "--version"]),
        (&["topic", "ls", "-s", "http://a:1"], &["-s", "http://a:1", "topic", "ls"]),
        (
            &["topic", "add", "x", "--retention=12h", "--server=http://a:1"],
            &["--server", "http://a:1", "topic", "add", "x", "--retention", "12h"],
        ),
        (&["pub", "topics", "a=b"], &["pub", "topics", "a=b"]),
        (&["pub", "t", "--", "--count=3", "-s"], &["pub", "t", "--", "--count=3", "-s"]),
    ];
    for (given, expected) in cases {
        assert_eq!(normalise(given.iter().map(|arg| (*arg).to_owned()).collect()), *expected);
    }
}

#[test]
fn servers_are_named_by_host_and_port() {
    let parse = |url| Endpoint::parse(url);
    assert_eq!(parse("http://b:2/"), parse("b:2"));
    assert_eq!(parse("http://[::1]:7942"), parse("[::1]:7942"));
    for url in ["https://a", "ftp://a", "http://", "http://a/b", "http://u:p@a", "http://a:x", "http://a b"] {
        assert!(matches!(parse(url), Err(Failure::Usage(_))), "{url}");
    }
}

#[test]
fn topic_add_sends_what_was_given_and_prints_the_topic() {
    let topic = r#"{"name":"orders","id":"00000000000000aa","partitions":6}"#;
    let done = narad(
        &[
            "topic",
            "add",
            "orders",
            "--partitions",
            "6",
            "--retention",
            "12h",
            "--visibility",
            "45s",
            "--max-in-flight",
            "0",
        ],
        "",
        vec![answer("201 Created", topic)],
    );
    done.result.unwrap();
    let shown = "{\n  \"name\": \"orders\",\n  \"id\": \"00000000000000aa\",\n  \"partitions\": 6\n}\n";
    assert_eq!(done.out, shown, "in the order of the API");
    assert_eq!(first_line(&done.seen[0]), "POST /v1/topics HTTP/1.1");
    for header in ["X-Narad-Client: narad-cli/", "Content-Type: application/json"] {
        assert!(done.seen[0].head.contains(header), "{}", done.seen[0].head);
    }
    let body: serde_json::Value = serde_json::from_slice(&done.seen[0].body).unwrap();
    let expected =
        serde_json::json!({"name":"orders","partitions":6,"retention_ms":43_200_000,"visibility_timeout_ms":45_000});
    assert_eq!(body, expected);
    // 0 is the server's default, forever is 0 on the wire.
    let forever = narad(&["topic", "add", "a", "--retention", "forever"], "", vec![answer("201 Created", topic)]);
    assert_eq!(forever.seen[0].body, br#"{"name":"a","retention_ms":0}"#);
    let default = narad(&["topic", "add", "a", "--retention", "0"], "", vec![answer("201 Created", topic)]);
    assert_eq!(default.seen[0].body, br#"{"name":"a"}"#);
    let refused =
        narad(&["topic", "add", "a"], "", vec![answer("409 Conflict", r#"{"error":"topic already exists"}"#)]);
    assert_eq!(failure(refused), "topic already exists (409)");
}

#[test]
fn topic_edit_sends_what_changes_and_refuses_what_cannot() {
    let topic = r#"{"name":"orders","partitions":9}"#;
    let edit = |args: &[&str]| {
        let args: Vec<&str> = ["topic", "edit", "orders"].iter().chain(args).copied().collect();
        narad(&args, "", vec![answer("200 OK", topic)])
    };
    let done = edit(&["--retention", "12h", "--partitions", "9", "--max-in-flight", "0"]);
    done.result.unwrap();
    assert_eq!(first_line(&done.seen[0]), "PATCH /v1/topics/orders HTTP/1.1");
    assert_eq!(done.seen[0].body, br#"{"max_in_flight_per_partition":0,"partitions":9,"retention_ms":43200000}"#);
    assert_eq!(edit(&["--retention", "forever"]).seen[0].body, br#"{"retention_ms":0}"#);
    for (args, says) in [
        (&["--visibility", "1s"][..], "fixed when a topic is created"),
        (&[], "nothing to change"),
        (&["--retention", "0"], "forever"),
        (&["--retention", "5"], "no unit"),
    ] {
        let outcome = edit(args);
        assert!(outcome.seen.is_empty(), "{args:?} was sent");
        match outcome.result {
            Err(Failure::Usage(text)) => assert!(text.contains(says), "{args:?}: {text}"),
            other => panic!("{args:?}: {other:?}"),
        }
    }
}

#[test]
fn topic_ls_walks_all_pages_on_one_connection() {
    let page = |token: &str, name: &str, retention: u64| {
        answer(
            "200 OK",
            &format!(
                r#"{{"next_page_token":"{token}","topics":[{{"name":"{name}","partitions":3,"retention_ms":{retention},"role":"{}"}}]}}"#,
                if name == "a" { "standalone" } else { "parent" }
            ),
        )
    };
    let pages = || vec![page("a", "a", 0), page("", "longer", 604_800_000)];
    let done = narad(&["topics", "ls"], "", pages());
    done.result.unwrap();
    assert_eq!(
        done.out,
        "NAME    PARTITIONS  RETENTION  ROLE\na       3           forever    -\nlonger  3           168h       parent\n"
    );
    assert_eq!(first_line(&done.seen[1]), "GET /v1/topics?page_token=a HTTP/1.1");
    assert_eq!(done.seen[1].connection, 1, "kept alive");
    let json = narad(&["topic", "ls", "--json"], "", pages());
    let topics: Vec<serde_json::Value> = serde_json::from_str(&json.out).unwrap();
    assert_eq!(topics.len(), 2);
    let endless = narad(&["topic", "ls"], "", vec![page("a", "a", 0), page("a", "a", 0)]);
    assert!(failure(endless).contains("pages of topics do not end"));
}

#[test]
fn topic_rm_asks_first() {
    let asked = narad(&["topic", "rm", "a"], "n\n", vec![]);
    assert_eq!(asked.err, "delete topic \"a\" and all its data? [y/N] ");
    assert_eq!(failure(asked), "nothing was deleted");
    let done = narad(&["topic", "rm", "a/b"], "y\n", vec![empty("204 No Content")]);
    done.result.unwrap();
    assert_eq!(first_line(&done.seen[0]), "DELETE /v1/topics/a%2Fb HTTP/1.1");
    let forced =
        narad(&["topic", "rm", "-f", "a"], "", vec![answer("404 Not Found", r#"{"error":"topic not found"}"#)]);
    assert_eq!(forced.err, "");
    assert_eq!(
        failure(forced),
        "topic not found: \"a\" (404): `narad topic ls` lists what there is, and letter case counts"
    );
}

#[test]
fn pub_sends_bytes_as_they_are() {
    let done = narad(&["pub", "t", "h\u{e9}llo", "-k", "a b", "--partition", "2"], "", vec![stored()]);
    done.result.unwrap();
    assert_eq!(first_line(&done.seen[0]), "POST /v1/topics/t/produce?key=a%20b&partition=2 HTTP/1.1");
    assert_eq!(done.seen[0].body, "h\u{e9}llo".as_bytes());
    assert!(done.seen[0].head.contains("Content-Type: application/octet-stream"));
    assert_eq!(done.err, "accepted (6 bytes)\n");
    let lines = narad(&["pub", "t"], "one\r\n\ntwo", vec![stored(); 2]);
    lines.result.unwrap();
    assert_eq!(lines.seen.iter().map(|seen| seen.body.as_slice()).collect::<Vec<_>>(), [b"one", b"two"]);
    assert!(lines.err.starts_with("accepted 2 messages in ") && lines.err.ends_with(" msg/s)\n"), "{}", lines.err);
    let stopped = narad(
        &["pub", "t", "m", "--count", "3"],
        "",
        vec![stored(), answer("503 Service Unavailable", r#"{"error":"memory budget exhausted, retry"}"#)],
    );
    assert!(stopped.err.starts_with("accepted 1 messages"), "{}", stopped.err);
    assert_eq!(failure(stopped), "memory budget exhausted, retry (503)");
}

#[test]
fn pub_batches_lines_and_repetitions() {
    let accepted = |n: u64| answer("202 Accepted", &format!("{{\"accepted\":{n}}}\n"));
    let done = narad(&["pub", "t", "--batch", "2", "-k", "k"], "a\nb\nc\n", vec![accepted(2), accepted(1)]);
    done.result.unwrap();
    assert_eq!(first_line(&done.seen[0]), "POST /v1/topics/t/produce/batch HTTP/1.1");
    let expected = r#"{"messages":[{"payload":"YQ==","payload_encoding":"base64","key":"k"},{"payload":"Yg==","payload_encoding":"base64","key":"k"}]}"#;
    assert_eq!(String::from_utf8_lossy(&done.seen[0].body), expected);
    let repeated = narad(
        &["pub", "t", "x", "--batch", "3", "--count", "7", "--partition", "0"],
        "",
        vec![accepted(3), accepted(3), accepted(1)],
    );
    repeated.result.unwrap();
    assert!(repeated.err.starts_with("accepted 7 messages in"));
    let partly = narad(&["pub", "t", "x", "--batch", "3", "--count", "3"], "", vec![accepted(2)]);
    assert_eq!(failure(partly), "the server accepted 2 of 3 messages");
}

#[test]
fn wrong_usage_is_found_before_anything_is_sent() {
    let cases: &[&[&str]] = &[
        &["pub", "t", "m", "-f", "/etc/hostname"],
        &["pub", "t", "--count", "2"],
        &["pub", "t", "-f", "/nonexistent/file"],
        &["sub", "t", "--from", "3"],
        &["sub", "t", "--peek", "--no-ack"],
        &["replay", "t", "--partition", "1", "--from", "3", "--to", "2"],
        &["topic", "add", "a", "--retention", "12"],
        &["topic", "add", "a", "--visibility", "forever"],
        &["topic", "add", "a", "--visibility", "1us"],
    ];
    for args in cases {
        let outcome = narad(args, "", vec![String::from("nothing is sent")]);
        assert!(matches!(outcome.result, Err(Failure::Usage(_))), "{args:?}: {:?}", outcome.result);
    }
}

const MESSAGE: &str =
    r#"{"topic":"t","partition":1,"offset":7,"key":"k","payload":{"n": 1},"timestamp":0,"receipt_handle":"1:7:99"}"#;

#[test]
fn sub_prints_and_acks_and_retries_acks_that_got_no_clear_answer() {
    let done = narad(
        &["sub", "t", "--count", "1"],
        "",
        vec![
            empty("204 No Content"),
            answer("200 OK", MESSAGE),
            answer("503 Service Unavailable", "the ack did not reach the partition owner and was not applied; retry"),
            answer("502 Bad Gateway", "the partition owner did not answer; the ack may have been applied; retry"),
            answer("410 Gone", r#"{"error":"receipt handle no longer matches an active reservation"}"#),
        ],
    );
    done.result.unwrap();
    assert_eq!(done.out, "[p1 @7] key=k 1970-01-01T00:00:00Z {\"n\": 1}\n");
    assert_eq!(done.err, "1 message(s) received\n");
    assert_eq!(first_line(&done.seen[0]), "GET /v1/topics/t/consume?wait=10s HTTP/1.1");
    assert_eq!(first_line(&done.seen[2]), "POST /v1/topics/t/ack?receipt_handle=1%3A7%3A99 HTTP/1.1");
    assert_eq!(done.seen.len(), 5);
}

/// A JSON string may hold half a surrogate pair, which is no text: such a message must not come back for ever.
#[test]
fn sub_shows_and_acks_a_string_that_is_no_text() {
    let message = MESSAGE.replace("{\"n\": 1}", r#""\ud800""#);
    for (raw, shown) in [(false, "[p1 @7] key=k 1970-01-01T00:00:00Z \"\\ud800\"\n"), (true, "\"\\ud800\"\n")] {
        let args = ["sub", "t", "--count", "1", "--raw"];
        let answers = vec![answer("200 OK", &message), empty("204 No Content")];
        let done = narad(&args[..if raw { 5 } else { 4 }], "", answers);
        done.result.unwrap();
        assert_eq!(done.out, shown);
        assert_eq!(done.seen.len(), 2, "it was acked");
    }
}

#[test]
fn sub_says_which_message_will_come_again() {
    let gone = answer("410 Gone", r#"{"error":"receipt handle no longer matches an active reservation"}"#);
    let done =
        narad(&["sub", "t", "--count", "1", "--raw", "--partition", "1"], "", vec![answer("200 OK", MESSAGE), gone]);
    done.result.unwrap();
    assert_eq!(done.out, "{\"n\": 1}\n");
    assert!(done.err.starts_with("[p1 @7] is not acked and will come again: receipt handle"), "{}", done.err);
    assert_eq!(first_line(&done.seen[0]), "GET /v1/topics/t/consume?wait=10s&partition=1 HTTP/1.1");
    let no_ack = narad(&["sub", "t", "--count", "1", "--no-ack"], "", vec![answer("200 OK", MESSAGE)]);
    assert_eq!(no_ack.seen.len(), 1);
}

#[test]
fn sub_peek_reads_along_from_the_end_and_skips_gaps() {
    let details = r#"{"name":"t","partition_stats":[{"index":0,"high_watermark":5,"status":"ok"},{"index":1,"high_watermark":7,"status":"ok"}]}"#;
    let done = narad(
        &["sub", "t", "--peek", "--count", "1"],
        "",
        vec![
            answer("200 OK", details),
            empty("204 No Content"),
            answer("410 Gone", r#"{"error":"offset 7 aged out of retention (oldest retained: 9)"}"#),
            empty("204 No Content"),
            answer("200 OK", MESSAGE),
        ],
    );
    done.result.unwrap();
    let lines: Vec<&str> = done.seen.iter().map(first_line).collect();
    assert_eq!(lines[1], "GET /v1/topics/t/consume?offset=5&partition=0 HTTP/1.1");
    assert_eq!(lines[4], "GET /v1/topics/t/consume?offset=9&partition=1 HTTP/1.1");
    let down = details.replacen("\"ok\"", "\"owner_unavailable\"", 1);
    let refused = narad(&["sub", "t", "--peek"], "", vec![answer("200 OK", &down)]);
    assert!(failure(refused).contains("give --partition and --from"));
}

#[test]
fn replay_prints_a_range_and_says_what_is_gone_from_it() {
    let details = r#"{"name":"t","partition_stats":[{"index":1,"oldest_offset":5,"high_watermark":9,"status":"ok"}]}"#;
    let record = |offset: u64| answer("200 OK", &MESSAGE.replace("\"offset\":7", &format!("\"offset\":{offset}")));
    let done = narad(
        &["replay", "t", "--partition", "1", "--from", "2"],
        "",
        vec![
            answer("200 OK", details),
            answer("410 Gone", r#"{"error":"offset 5 aged out of retention (oldest retained: 6)"}"#),
            record(6),
            answer("410 Gone", r#"{"error":"record is unreadable"}"#),
            record(8),
        ],
    );
    done.result.unwrap();
    let lines: Vec<&str> = done.seen.iter().map(first_line).collect();
    assert_eq!(lines[0], "GET /v1/topics/t?partition=1 HTTP/1.1");
    assert_eq!(lines[1], "GET /v1/topics/t/consume?offset=5&partition=1 HTTP/1.1");
    assert_eq!(lines[4], "GET /v1/topics/t/consume?offset=8&partition=1 HTTP/1.1");
    assert_eq!(done.out.lines().count(), 2, "{}", done.out);
    assert!(done.out.starts_with("[p1 @6] key=k 1970-01-01T00:00:00Z {\"n\": 1}\n[p1 @8] "), "{}", done.out);
    assert_eq!(
        done.err,
        "[p1 @5] left out, up to 6: offset 5 aged out of retention (oldest retained: 6)\n\
         [p1 @7] left out, up to 8: record is unreadable\n\
         2 message(s) replayed from p1 [5, 9)\n"
    );
    let part = narad(
        &["replay", "t", "--partition", "1", "--from", "7", "--to", "8", "--raw"],
        "",
        vec![answer("200 OK", details), record(7)],
    );
    assert_eq!((part.out.as_str(), part.err.as_str()), ("{\"n\": 1}\n", "1 message(s) replayed from p1 [7, 8)\n"));
    let nothing = narad(&["replay", "t", "--partition", "1", "--from", "70"], "", vec![answer("200 OK", details)]);
    assert_eq!(nothing.err, "0 message(s) replayed from p1 [70, 70)\n");
    let down = details.replacen("\"ok\"", "\"owner_unavailable\"", 1);
    let refused = narad(&["replay", "t", "--partition", "1"], "", vec![answer("200 OK", &down)]);
    assert!(failure(refused).starts_with("partition 1 is not served (unknown): its node is down, or cannot open it"));
}

#[test]
fn server_report_adds_up_what_is_known_and_names_what_is_not() {
    let page = r#"{"next_page_token":"","topics":[{"name":"a","partitions":2,"role":"standalone"},{"name":"gone","partitions":3,"role":"standalone"},{"name":"longer","partitions":2,"role":"standalone"}]}"#;
    let a = r#"{"partition_stats":[{"index":0,"oldest_offset":5,"high_watermark":9,"size_bytes":4096,"owner_node":"n1","status":"ok"},{"index":1,"oldest_offset":0,"high_watermark":1,"size_bytes":4096,"owner_node":"n2","status":"ok"}]}"#;
    let longer = r#"{"partition_stats":[{"index":0,"oldest_offset":0,"high_watermark":10,"size_bytes":1048576,"owner_node":"n1","status":"ok"},{"index":1,"oldest_offset":0,"high_watermark":99,"size_bytes":99,"owner_node":"n1","status":"owner_unavailable"}]}"#;
    let answers = || {
        vec![
            answer("200 OK", page),
            answer("200 OK", a),
            answer("404 Not Found", r#"{"error":"topic not found"}"#),
            answer("200 OK", longer),
        ]
    };
    let done = narad(&["server", "report"], "", answers());
    done.result.unwrap();
    let expected = "TOPIC   PARTS  MESSAGES  SIZE    OWNERS  ROLE\n\
                    a       2      5         8KiB    n1,n2   -\n\
                    longer  2      10        1MiB    n1      -           [1 of 2 partitions unavailable]\n\
                    total   4      15        1.0MiB          2 topic(s)\n\
                    1 topic(s) partial: what is unavailable is in no number\n";
    assert_eq!(done.out, expected);
    assert_eq!(first_line(&done.seen[3]), "GET /v1/topics/longer HTTP/1.1");
}

#[test]
fn lesson_n87_a_redirect_is_never_followed() {
    let redirect = "HTTP/1.1 302 Found\r\nLocation: http://evil.example/\r\nContent-Length: 0\r\n\r\n".to_owned();
    let outcome = narad(&["topic", "info", "a"], "", vec![redirect]);
    assert_eq!(outcome.seen.len(), 1);
    assert!(failure(outcome).contains("answered 302, a redirect to \"http://evil.example/\", which is not followed"));
}

#[test]
fn a_number_that_is_none_is_told_its_range() {
    let said = |args: &[&str]| match Narad::from_args(&["narad"], args) {
        Err(exit) => usage::explain(exit.output.trim_end(), args),
        Ok(parsed) => panic!("{args:?} was taken: {parsed:?}"),
    };
    assert_eq!(
        said(&["topic", "edit", "t", "--max-in-flight", "-1"]),
        "--max-in-flight \"-1\" is not a whole number from 0 to 4294967295: `narad topic edit --help` lists what there is"
    );
    for (args, range) in [
        (&["topic", "add", "t", "--partitions", "100000"][..], "from 0 to 99999:"),
        (&["topic", "add", "t", "--max-in-flight", "x"], "from 0 to 4294967295:"),
        (&["topic", "add", "t", "--max-acked-ahead", "1.5"], "from 0 to 4294967295:"),
        (&["topic", "edit", "t", "--partitions", "many"], "from 0 to 99999:"),
        (&["topic", "edit", "t", "--max-acked-ahead", ""], "from 0 to 4294967295:"),
        (&["pub", "t", "m", "--count", "0"], "from 1 to 18446744073709551615:"),
        (&["pub", "t", "m", "--rate", "0"], "from 1 to 18446744073709551615:"),
        (&["pub", "t", "m", "--batch", "1001"], "from 1 to 1000:"),
        (&["pub", "t", "m", "--partition", "-1"], "from 0 to 99998:"),
        (&["sub", "t", "--partition", "99999"], "from 0 to 99998:"),
        (&["sub", "t", "--count", "ten"], "from 1 to 18446744073709551615:"),
        (&["sub", "t", "--peek", "--from", "99999999999999999999"], "from 0 to 18446744073709551615:"),
    ] {
        let text = said(args);
        let (flag, given) = (args[args.len() - 2], args[args.len() - 1]);
        assert!(
            text.starts_with(&format!("{flag} {given:?} is not a whole number ")) && text.contains(range),
            "{text}"
        );
    }
}

/// Whatever listens there and speaks JSON is not taken for a broker.
#[test]
fn another_server_is_told_from_a_broker_by_every_command() {
    let page = r#"{"next_page_token":"","topics":[{}]}"#;
    for (args, status, body) in [
        (&["top", "--once"][..], "200 OK", "{}"),
        (&["top", "--once"], "200 OK", "[1]"),
        (&["top", "--once"], "404 Not Found", "<html>no such page</html>"),
        (&["topic", "ls"], "200 OK", "{}"),
        (&["server", "report"], "200 OK", "{}"),
        (&["topic", "ls"], "200 OK", page),
        (&["topic", "info", "t"], "200 OK", "{}"),
        (&["topic", "info", "t"], "200 OK", "\"hello\""),
        (&["topic", "info", "t"], "404 Not Found", "<html>\n<body>no such page</body></html>"),
        (&["topic", "add", "t"], "201 Created", "{}"),
        (&["topic", "add", "t"], "200 OK", "{}"),
        (&["topic", "edit", "t", "--partitions", "9"], "200 OK", "[]"),
        (&["topic", "rm", "t", "-f"], "200 OK", "{}"),
        (&["pub", "t", "m"], "200 OK", "{}"),
        (&["pub", "t", "m"], "202 Accepted", ""),
        (&["pub", "t", "m"], "202 Accepted\r\nX-Narad-Shard: 0", "{}"),
        (&["pub", "t", "m", "--batch", "2"], "202 Accepted", "{}"),
        (&["sub", "t", "--count", "1"], "200 OK", "{}"),
        (&["sub", "t", "--peek"], "200 OK", "{}"),
        (&["replay", "t", "--partition", "0"], "200 OK", "{}"),
    ] {
        let text = failure(narad(args, "", vec![answer(status, body)]));
        let asks = "is it one? --server or the environment variable NARAD_ADDR names another address";
        let named = text.starts_with("127.0.0.1:") && text.contains(" answers, but not as a narad broker does (");
        assert!(named && text.ends_with(asks), "{args:?} {body}: {text}");
    }
}

#[test]
fn answers_are_read_in_every_framing() {
    let chunked =
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\n{\"a\r\n5\r\n\": 1}\r\n0\r\nTrailer: 1\r\n\r\n"
            .to_owned();
    let to_the_end = "HTTP/1.1 200 OK\r\n\r\n{\"b\": 2}!".to_owned();
    let closing = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}!".to_owned();
    let interim = format!("HTTP/1.1 100 Continue\r\n\r\n{}", answer("200 OK", "{}"));
    let (mut client, thread) = server(vec![chunked, to_the_end, closing, interim, empty("204 No Content")]);
    let bodies: Vec<(u16, Vec<u8>)> = (0..5)
        .map(|_| client.call(&Request::new("GET", "/")).map(|response| (response.status, response.body)).unwrap())
        .collect();
    let expected: [(u16, &[u8]); 5] =
        [(200, b"{\"a\": 1}"), (200, b"{\"b\": 2}"), (200, b"{}"), (200, b"{}"), (204, b"")];
    assert_eq!(bodies, expected.map(|(status, body)| (status, body.to_vec())));
    drop(client);
    let connections: Vec<usize> = thread.join().unwrap().iter().map(|seen| seen.connection).collect();
    assert_eq!(connections, [1, 1, 2, 3, 3]);
}

#[test]
fn no_answer_is_told_from_a_refusal() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut client = Client::new(Endpoint::parse(&free.to_string()).unwrap());
    match client.call(&Request::new("GET", "/")) {
        Err(Failure::Unreachable(text)) => assert_eq!(
            text,
            format!("cannot reach {free}: nothing listens there (connection refused): is the broker running? --server or the environment variable NARAD_ADDR names another address")
        ),
        other => panic!("{other:?}"),
    }
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let mut client = Client::new(Endpoint::parse(&address).unwrap()).with_patience(Duration::from_millis(20));
    match client.call(&Request::new("GET", "/")) {
        Err(Failure::Unreachable(text)) => assert_eq!(
            text,
            format!("{address} accepts connections and does not answer (waited 20ms): the broker is stopped, stuck or far too busy: look at its process and its log")
        ),
        other => panic!("{other:?}"),
    }
    for (text, expected) in [
        ("!", "closed the connection: it may have been done all the same; did the broker stop just now?"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab!", "broke off"),
        ("SSH-2.0-OpenSSH\r\n!", "does not look like a Narad server"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n!", "too large"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n!", "no size"),
    ] {
        let (mut client, thread) = server(vec![text.to_owned()]);
        match client.call(&Request::new("POST", "/")) {
            Err(Failure::Unreachable(text)) => {
                assert!(text.contains(expected) && text.contains("may have been done"), "{text}")
            }
            other => panic!("{text:?}: {other:?}"),
        }
        drop(client);
        thread.join().unwrap();
    }
}

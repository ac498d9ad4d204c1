//! What the parser says of a wrong command line, made into a sentence that also says what to do.

/// Words that lead to a command's own `--help`.
const COMMANDS: [&str; 23] = [
    "serve",
    "server",
    "start",
    "report",
    "doctor",
    "cpus",
    "top",
    "topic",
    "cluster",
    "members",
    "forget",
    "add",
    "ls",
    "info",
    "edit",
    "rm",
    "pub",
    "sub",
    "replay",
    "ctx",
    "select",
    "completion",
    "version",
];

/// `text` is the parser's; `args` what was typed, the program's name left out.
pub fn explain(text: &str, args: &[&str]) -> String {
    let skipped = 2 * args.iter().step_by(2).take_while(|arg| super::FRONT.contains(arg)).count();
    let typed = args.iter().skip(skipped).take_while(|arg| COMMANDS.contains(arg));
    let command: Vec<&str> = ["narad"].into_iter().chain(typed.copied()).collect();
    let command = command.join(" ");
    let help = format!("`{command} --help` lists what there is");
    let quoted = |name: &str| name.trim_matches(&['\'', '.'][..]).to_owned();
    if let Some(word) = text.strip_prefix("Unrecognized argument: ") {
        return match word.starts_with('-') {
            true => format!("{command} has no flag {word}: {help}"),
            false => format!("{command} does not know what to do with {word:?}: {help}"),
        };
    }
    if let Some(name) = text.strip_prefix("No value provided for option ") {
        return format!("{} needs a value behind it: {help}", quoted(name));
    }
    if let Some((name, rest)) =
        text.strip_prefix("Error parsing option ").and_then(|rest| rest.split_once(" with value "))
    {
        let (value, why) = rest.split_once(": ").unwrap_or((rest, "cannot be read"));
        let (name, value) = (quoted(name), value.trim_matches('\''));
        // Types of ours say what would have been good.
        return match why {
            whole if whole.starts_with("--") => whole.to_owned(),
            is_not if is_not.starts_with("is not") => format!("{name} {value:?} {is_not}: {help}"),
            other => format!("{name} {value:?}: {other}: {help}"),
        };
    }
    let joined = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    format!("{joined}: {help}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_command_line_is_told_what_to_do() {
        for (text, args, sentence) in [
            (
                "Unrecognized argument: --bogus",
                &["serve", "--bogus"][..],
                "narad serve has no flag --bogus: `narad serve --help` lists what there is",
            ),
            (
                "Unrecognized argument: topp",
                &["-s", "h:1", "topp"],
                "narad does not know what to do with \"topp\": `narad --help` lists what there is",
            ),
            (
                "Unrecognized argument: --x",
                &["cluster", "members", "--x"],
                "narad cluster members has no flag --x: `narad cluster members --help` lists what there is",
            ),
            (
                "Unrecognized argument: x",
                &["-s", "h:1", "--ctx", "topic", "ctx", "ls", "x"],
                "narad ctx ls does not know what to do with \"x\": `narad ctx ls --help` lists what there is",
            ),
            (
                "No value provided for option '--cpus'.",
                &["server", "start", "--cpus"],
                "--cpus needs a value behind it: `narad server start --help` lists what there is",
            ),
            (
                "Error parsing option '--count' with value 'x': is not a whole number from 1 to 9",
                &["pub", "t", "--count", "x"],
                "--count \"x\" is not a whole number from 1 to 9: `narad pub --help` lists what there is",
            ),
            (
                "Error parsing option '--sort' with value 'x': --sort \"x\" is none of a",
                &["top"],
                "--sort \"x\" is none of a",
            ),
            (
                "Required positional arguments not provided:\n    name\n",
                &["topic", "add"],
                "Required positional arguments not provided: name: `narad topic add --help` lists what there is",
            ),
        ] {
            assert_eq!(explain(text, args), sentence);
        }
    }
}

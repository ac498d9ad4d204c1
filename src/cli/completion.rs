//! `narad completion bash|zsh|fish`: a script for the shell, made from the commands themselves.
//!
//! All three work alike: walk over what was typed to find the command, then offer its subcommands and flags. A word
//! behind an option is its value, and completes as a file name.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write;

use argh::{ArgsInfo, CommandInfoWithArgs, FromArgs};

use super::{Failure, Narad};

/// Print a script that completes commands and flags: source <(narad completion bash)
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "completion")]
pub struct Completion {
    /// bash, zsh or fish
    #[argh(positional)]
    shell: String,
}

pub fn run(command: &Completion, out: &mut dyn Write) -> Result<(), Failure> {
    let script = match command.shell.as_str() {
        "bash" => bash(&Tree::new()),
        "zsh" => zsh(&Tree::new()),
        "fish" => fish(&Tree::new()),
        other => return Err(Failure::Usage(format!("completion: {other:?} is none of bash, zsh, fish"))),
    };
    Ok(out.write_all(script.as_bytes())?)
}

/// What may follow a command.
struct Choice {
    word: String,
    description: String,
}

struct Tree {
    /// Commands with their subcommands behind them, such as `narad topic add`, and what may follow each.
    commands: Vec<(String, Vec<Choice>)>,
    /// Flags with a value behind them, of any command.
    valued: BTreeSet<String>,
}

impl Tree {
    fn new() -> Tree {
        let mut tree = Tree { commands: Vec::new(), valued: BTreeSet::new() };
        tree.walk("narad".to_owned(), &Narad::get_args_info());
        // The command line takes these anywhere.
        let front: Vec<(String, String)> = tree.commands[0]
            .1
            .iter()
            .filter(|choice| choice.word.starts_with('-'))
            .map(|choice| (choice.word.clone(), choice.description.clone()))
            .collect();
        for (_, choices) in &mut tree.commands[1..] {
            for (word, description) in &front {
                if choices.iter().all(|choice| choice.word != *word) {
                    choices.push(Choice { word: word.clone(), description: description.clone() });
                }
            }
        }
        tree
    }

    fn walk(&mut self, path: String, command: &CommandInfoWithArgs) {
        let mut choices = Vec::new();
        for subcommand in &command.commands {
            let description = subcommand.command.description.to_owned();
            choices.push(Choice { word: subcommand.name.to_owned(), description });
        }
        for flag in command.flags.iter().filter(|flag| !flag.hidden) {
            let short = flag.short.map(|short| format!("-{short}"));
            for word in [Some(flag.long.to_owned()), short].into_iter().flatten() {
                if matches!(flag.kind, argh::FlagInfoKind::Option { .. }) {
                    self.valued.insert(word.clone());
                }
                choices.push(Choice { word, description: flag.description.to_owned() });
            }
        }
        self.commands.push((path.clone(), choices));
        for subcommand in &command.commands {
            self.walk(format!("{path} {}", subcommand.name), &subcommand.command);
        }
    }

    /// Commands below the first, each in double quotes.
    fn quoted(&self, between: &str) -> String {
        let quoted: Vec<String> = self.commands[1..].iter().map(|(path, _)| format!("\"{path}\"")).collect();
        quoted.join(between)
    }

    fn valued(&self, between: &str) -> String {
        self.valued.iter().map(String::as_str).collect::<Vec<_>>().join(between)
    }

    /// The walk, for shells of Bourne's family; `words` is what was typed between the program and the cursor. Sets
    /// `at` to the command and `previous` to the word before the cursor, unless that is a value.
    fn walk_script(&self, words: &str) -> String {
        format!(
            "    for word in {words}; do\n\
             \x20       case \"$previous\" in {valued}) previous=; continue ;; esac\n\
             \x20       case \"$at $word\" in {commands}) at=\"$at $word\" ;; esac\n\
             \x20       previous=$word\n\
             \x20   done\n",
            valued = self.valued("|"),
            commands = self.quoted("|"),
        )
    }
}

fn bash(tree: &Tree) -> String {
    let mut script = format!(
        "# bash completion of narad; load it with: source <(narad completion bash)\n\
         _narad() {{\n\
         \x20   local at=narad previous= word words= cur=\"${{COMP_WORDS[COMP_CWORD]}}\"\n\
         \x20   COMPREPLY=()\n\
         {walk}\
         \x20   case \"$previous\" in {valued}) return ;; esac\n\
         \x20   case \"$at\" in\n",
        walk = tree.walk_script("\"${COMP_WORDS[@]:1:COMP_CWORD-1}\""),
        valued = tree.valued("|"),
    );
    for (path, choices) in &tree.commands {
        let words: Vec<&str> = choices.iter().map(|choice| choice.word.as_str()).collect();
        let _ = writeln!(script, "        \"{path}\") words=\"{}\" ;;", words.join(" "));
    }
    script.push_str(
        "    esac\n    COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n}\ncomplete -o default -F _narad narad\n",
    );
    script
}

fn zsh(tree: &Tree) -> String {
    let mut script = format!(
        "#compdef narad\n\
         # zsh completion of narad; load it with: source <(narad completion zsh), or as _narad on the fpath\n\
         _narad() {{\n\
         \x20   local at=narad previous= word\n\
         \x20   local -a choices\n\
         {walk}\
         \x20   case \"$previous\" in {valued}) _files; return ;; esac\n\
         \x20   case \"$at\" in\n",
        walk = tree.walk_script("\"${(@)words[2,CURRENT-1]}\""),
        valued = tree.valued("|"),
    );
    for (path, choices) in &tree.commands {
        let words: Vec<String> = choices
            .iter()
            .map(|choice| format!("'{}:{}'", choice.word, choice.description.replace('\'', "'\\''")))
            .collect();
        let _ = writeln!(script, "        \"{path}\") choices=({}) ;;", words.join(" "));
    }
    script.push_str(
        "    esac\n    _describe narad choices || _files\n}\n\
         if [ \"$funcstack[1]\" = _narad ]; then\n    _narad \"$@\"\nelse\n\
         \x20   (( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i; }\n\
         \x20   compdef _narad narad\nfi\n",
    );
    script
}

fn fish(tree: &Tree) -> String {
    let mut script = format!(
        "# fish completion of narad; load it with: narad completion fish | source\n\
         function __narad_at\n\
         \x20   set -l at narad\n\
         \x20   set -l previous ''\n\
         \x20   for word in (commandline -opc)[2..]\n\
         \x20       if contains -- $previous {valued}\n\
         \x20           set previous ''\n\
         \x20           continue\n\
         \x20       end\n\
         \x20       contains -- \"$at $word\" {commands}; and set at \"$at $word\"\n\
         \x20       set previous $word\n\
         \x20   end\n\
         \x20   echo $at\n\
         end\n",
        valued = tree.valued(" "),
        commands = tree.quoted(" "),
    );
    for (path, choices) in &tree.commands {
        for Choice { word, description } in choices {
            let kind = match (word.strip_prefix("--"), word.strip_prefix('-')) {
                (Some(long), _) => format!("-l {long}"),
                (None, Some(short)) => format!("-s {short}"),
                (None, None) => format!("-f -a {word}"),
            };
            let value = if tree.valued.contains(word) { " -r" } else { "" };
            let description = description.replace('\\', "\\\\").replace('\'', "\\'");
            let _ = writeln!(
                script,
                "complete -c narad -n 'test (__narad_at) = \"{path}\"' {kind}{value} -d '{description}'"
            );
        }
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_and_flag_is_in_every_script() {
        let tree = Tree::new();
        let paths: Vec<&str> = tree.commands.iter().map(|(path, _)| path.as_str()).collect();
        for path in ["narad", "narad serve", "narad server start", "narad topic add", "narad completion"] {
            assert!(paths.contains(&path), "{path} is not in {paths:?}");
        }
        for script in [bash(&tree), zsh(&tree), fish(&tree)] {
            for word in ["--data-dir", "--visibility", "--server"] {
                assert!(script.contains(word.trim_start_matches('-')), "{word}");
            }
            assert!(paths.iter().all(|path| script.contains(&format!("\"{path}\""))));
        }
    }

    #[test]
    fn every_command_has_its_exit_status_on_the_page_for_operators() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operating.md");
        let page = std::fs::read_to_string(path).unwrap();
        let (_, statuses) = page.split_once("\n## Exit status\n").unwrap();
        for (path, _) in Tree::new().commands {
            let command: Vec<&str> = path.split(' ').skip(1).collect();
            let command = match command[..] {
                [] | ["server"] => continue,
                ["server", verb, ..] => format!("`server {verb}`"),
                [first, ..] => format!("`{first}`"),
            };
            assert!(statuses.contains(&command), "{command} has no exit status in docs/operating.md");
        }
    }

    /// In a real bash: what is offered behind each of these.
    #[test]
    fn bash_offers_what_may_follow() {
        let offered = |typed: &[&str]| {
            let words: Vec<String> = typed.iter().map(|word| format!("'{word}'")).collect();
            let script = format!(
                "{}\nCOMP_WORDS=({}); COMP_CWORD={}; _narad; printf '%s ' \"${{COMPREPLY[@]}}\"",
                bash(&Tree::new()),
                words.join(" "),
                typed.len() - 1
            );
            let output = std::process::Command::new("bash").args(["--norc", "-c", &script]).output().unwrap();
            assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        assert_eq!(offered(&["narad", "topi"]), "topic");
        assert_eq!(offered(&["narad", "topic", "e"]), "edit");
        assert_eq!(offered(&["narad", "-s", "pub", "topic", "i"]), "info", "the value of -s is no command");
        assert_eq!(offered(&["narad", "topic", "add", "orders", "--ret"]), "--retention");
        assert_eq!(offered(&["narad", "serve", "--data-dir", ""]), "", "a value: left to the names of files");
        assert_eq!(offered(&["narad", "topic", "add", "topic", "--ser"]), "--server", "wherever it is taken");
    }

    /// In a real zsh where there is one, in which nobody has set completion up.
    #[test]
    fn zsh_sets_completion_up_where_nobody_has() {
        let script = zsh(&Tree::new());
        let (set_up, used) = (script.find("&& compinit -i"), script.rfind("compdef _narad narad"));
        assert!(set_up.is_some() && set_up < used, "{script}");
        let script = format!("{script}\nprint -r -- \"$_comps[narad]\"");
        let home = std::env::temp_dir().join(format!("narad-zsh-{}", std::process::id()));
        std::fs::create_dir_all(&home).unwrap();
        let mut shell = std::process::Command::new("zsh");
        let output = shell.env("ZDOTDIR", &home).env("HOME", &home).args(["-f", "-c", &script]).output();
        std::fs::remove_dir_all(&home).unwrap();
        let Ok(output) = output else { return };
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(out.trim() == "_narad" && err.is_empty(), "{out}{err}");
    }

    #[test]
    fn another_shell_is_refused_with_the_list() {
        let command = Completion { shell: "tcsh".to_owned() };
        let refused = run(&command, &mut Vec::new());
        assert_eq!(refused, Err(Failure::Usage("completion: \"tcsh\" is none of bash, zsh, fish".to_owned())));
    }
}

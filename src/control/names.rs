//! Topic names become directory names: checked here again, whoever has checked before (lessons N75.2, N75.3).

const NAME_CHARACTERS_MAX: usize = 200;
/// Of a topic: partition directories are numbered with five digits.
pub const PARTITIONS_MAX: u32 = 99_999;

/// 1 to 200 characters of `A-Z a-z 0-9 . _ -`, neither `.` nor `..`.
pub fn check_topic_name(name: &str) -> Result<(), String> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    match name {
        "" => Err("a topic name must not be empty".to_owned()),
        "." | ".." => Err(format!("{name:?} is no topic name")),
        _ if name.len() > NAME_CHARACTERS_MAX => Err(format!(
            "a topic name has at most {NAME_CHARACTERS_MAX} characters, this one has {}",
            name.chars().count()
        )),
        _ if !name.bytes().all(allowed) => Err("a topic name holds only A-Z a-z 0-9 . _ -".to_owned()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lesson_n75_2_and_3_names_are_safe_path_elements() {
        for name in ["a", "A.b_c-9", "...", &"x".repeat(200)] {
            assert_eq!(check_topic_name(name), Ok(()), "{name}");
        }
        for name in ["", ".", "..", "a/b", "../x", "a b", "a\0", "\u{e9}", "a\n", &"x".repeat(201)] {
            assert!(check_topic_name(name).is_err(), "{name:?} was accepted");
        }
    }
}

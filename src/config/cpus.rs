//! Sets of CPUs in the kernel's list form: `0-3,8`.

use std::collections::BTreeSet;
use std::fmt;

/// CPU numbers, ascending. Displays in list form.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct CpuSet(BTreeSet<u32>);

impl CpuSet {
    /// Parses `2-5,8`; blanks and a trailing newline are allowed, as is the empty list that cgroup files hold.
    pub fn parse(text: &str) -> Result<CpuSet, String> {
        /// Far above any machine; keeps a typo from filling the memory.
        const CPU_MAX: u32 = 1 << 16;
        let wrong = || format!("{text:?} is not a list of CPUs: write numbers and ranges, such as \"2-5,8\"");
        let mut cpus = BTreeSet::new();
        for part in text.trim().split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let first: u32 = first.trim().parse().map_err(|_| wrong())?;
            let last: u32 = last.trim().parse().map_err(|_| wrong())?;
            if first > last || last >= CPU_MAX {
                return Err(wrong());
            }
            cpus.extend(first..=last);
        }
        Ok(CpuSet(cpus))
    }

    pub fn intersection(&self, other: &CpuSet) -> CpuSet {
        CpuSet(self.0.intersection(&other.0).copied().collect())
    }

    /// What is in this set and not in the other.
    pub fn difference(&self, other: &CpuSet) -> CpuSet {
        CpuSet(self.0.difference(&other.0).copied().collect())
    }

    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> CpuSet {
        CpuSet(cpus.into_iter().collect())
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while cpus.peek() == Some(&(last + 1)) {
                last = cpus.next().unwrap_or(last);
            }
            match last - first {
                0 => write!(f, "{separator}{first}")?,
                _ => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        let cases = [
            ("0-3,8\n", vec![0, 1, 2, 3, 8], "0-3,8"),
            ("5", vec![5], "5"),
            ("", vec![], ""),
            ("\n", vec![], ""),
            ("3,1,2", vec![1, 2, 3], "1-3"),
            ("0-1,2-3", vec![0, 1, 2, 3], "0-3"),
            ("0 - 1 , 4", vec![0, 1, 4], "0-1,4"),
        ];
        for (text, cpus, shown) in cases {
            let set = CpuSet::parse(text).unwrap();
            assert_eq!(set.iter().collect::<Vec<_>>(), cpus, "{text:?}");
            assert_eq!(set.to_string(), shown);
        }
        for text in ["a", "3-1", "1-", "-1", "0-99999999", "1;2", "0x1"] {
            assert!(CpuSet::parse(text).is_err(), "{text:?} was accepted");
        }
    }
}

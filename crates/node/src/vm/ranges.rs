//! Ranges that are in order and do not overlap.

use std::ops::Range;

/// Parts of ranges that are in none of the others, each with the number of its range.
pub(super) fn without<T: Copy + Ord>(
    ranges: &[Range<T>],
    others: &[Range<T>],
) -> Vec<(usize, Range<T>)> {
    let (mut left, mut next) = (Vec::new(), 0);
    for (number, range) in ranges.iter().enumerate() {
        let mut start = range.start;
        while others.get(next).is_some_and(|other| other.end <= start) {
            next += 1;
        }
        // The last of them may reach into the next range.
        for other in others[next..].iter().take_while(|other| other.start < range.end) {
            if other.start > start {
                left.push((number, start..other.start));
            }
            start = start.max(other.end);
        }
        if start < range.end {
            left.push((number, start..range.end));
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_taken_out_of_others() {
        let ranges = |ends: &[[usize; 2]]| ends.iter().map(|it| it[0]..it[1]).collect::<Vec<_>>();
        let less = |all: &[[usize; 2]], others: &[[usize; 2]]| -> Vec<[usize; 3]> {
            let left = without(&ranges(all), &ranges(others));
            left.iter().map(|(number, it)| [*number, it.start, it.end]).collect()
        };
        assert_eq!(less(&[[0, 10]], &[]), [[0, 0, 10]]);
        assert_eq!(less(&[[0, 10], [20, 30]], &[[0, 10]]), [[1, 20, 30]]);
        assert_eq!(less(&[[0, 10], [20, 30]], &[[5, 25]]), [[0, 0, 5], [1, 25, 30]]);
        let parts = [[0, 0, 1], [0, 2, 4], [0, 5, 9]];
        assert_eq!(less(&[[0, 10]], &[[1, 2], [4, 5], [9, 20]]), parts);
        assert_eq!(less(&[[0, 2], [4, 6], [8, 10]], &[[0, 3], [5, 9]]), [[1, 4, 5], [2, 9, 10]]);
    }
}

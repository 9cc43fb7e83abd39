//! Medians of figures that vary from round to round, and how certain they are.

/// Of an even number the mean of the two middle ones. Not a number if there is no figure.
pub(crate) fn median(figures: impl Iterator<Item = f64>) -> f64 {
    let figures = sorted(figures);
    let at = |place: usize| figures.get(place).copied().unwrap_or(f64::NAN);
    at(figures.len() / 2).midpoint(at(figures.len().saturating_sub(1) / 2))
}

/// The highest. Not a number if one is not, or if there is none: then nothing is known of the
/// worst.
pub(crate) fn highest(figures: impl IntoIterator<Item = f64>) -> f64 {
    let higher = |a: f64, b: f64| if a.is_nan() || a > b { a } else { b };
    figures.into_iter().reduce(higher).unwrap_or(f64::NAN)
}

fn sorted(figures: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    figures
}

/// The 95 % interval of the median, by order statistics: each figure is below the true median with a
/// chance of one half. Fewer than six figures have none.
pub(crate) fn interval(figures: impl Iterator<Item = f64>) -> Option<[f64; 2]> {
    let figures = sorted(figures);
    let count = i32::try_from(figures.len()).ok()?;
    // The chance that so many of the figures, or fewer, are below the median.
    let (mut chance, mut exactly) = (0.0, 0.5_f64.powi(count));
    let mut interval = None;
    for below in 0..count / 2 {
        chance += exactly;
        if 2.0 * chance > 0.05 {
            break;
        }
        let at = usize::try_from(below).ok()?;
        interval = Some([figures[at], figures[figures.len() - 1 - at]]);
        exactly *= f64::from(count - below) / f64::from(below + 1);
    }
    interval
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It was the upper one of the two: of the 60 pairs of `churn` one ratio above the middle.
    #[test]
    fn the_median_of_an_even_number_is_between_the_middle_ones() {
        assert_eq!(median([4.0, 1.0, 3.0, 2.0].into_iter()), 2.5);
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), 2.0);
        assert!(median(std::iter::empty()).is_nan());
    }

    /// `f64::max` ignores what is not a number, so a round without a figure met every goal.
    #[test]
    fn the_highest_of_something_unknown_is_unknown() {
        assert_eq!(highest([1.0, 3.0, 2.0]), 3.0);
        assert!(highest([]).is_nan());
        for figures in [[f64::NAN, 1.0, 2.0], [1.0, f64::NAN, 2.0], [1.0, 2.0, f64::NAN]] {
            assert!(highest(figures).is_nan(), "{figures:?}");
        }
    }

    #[test]
    fn the_interval_of_a_median_needs_six_figures() {
        let of = |count: u32| interval((1..=count).rev().map(f64::from));
        assert_eq!(of(5), None);
        assert_eq!(of(6), Some([1.0, 6.0]));
        assert_eq!(of(9), Some([2.0, 8.0]));
        assert_eq!(of(15), Some([4.0, 12.0]));
    }
}

//! Input and output lengths of a load's requests, in tokens.

use std::path::Path;

use rand::Rng;
use rand_distr::{Distribution, LogNormal};
use serde::Deserialize;

use super::numpy_pcg::DefaultRng;
use super::seeds::{Purpose, stream};
use super::spec::Lengths;
use crate::{Error, Result};

/// (input, output) tokens of one request.
pub type LengthPair = (usize, usize);

/// Log-normal lengths are cut here, in multiples of the mean, so that a plan has a longest request.
const LOG_NORMAL_CUT: f64 = 4.0;

/// # Errors
/// A length file that cannot be read or holds no usable row.
pub fn draw(
    lengths: &Lengths,
    input: usize,
    output: usize,
    count: usize,
    seed: u64,
) -> Result<Vec<LengthPair>> {
    let mut random = stream(seed, Purpose::Lengths);
    let pairs = match lengths {
        Lengths::Fixed => vec![(input, output); count],
        Lengths::Uniform { ratio } => {
            let mut draw = |mean| {
                let (low, high) = bounds(mean, *ratio);
                random.random_range(low..=high) as usize
            };
            (0..count).map(|_| (draw(input), draw(output))).collect()
        }
        Lengths::NumpyUniform { ratio } => {
            let mut random = DefaultRng::new(seed);
            let mut draw_all = |mean| -> Vec<usize> {
                let (low, high) = bounds(mean, *ratio);
                (0..count).map(|_| random.integer(low, high + 1) as usize).collect()
            };
            let inputs = draw_all(input);
            inputs.into_iter().zip(draw_all(output)).collect()
        }
        Lengths::LogNormal { sigma } => {
            let mut draw = |mean: usize| {
                let mean = mean as f64;
                let location = mean.ln() - sigma * sigma / 2.0;
                let value = LogNormal::new(location, *sigma).map_or(mean, |law| law.sample(&mut random));
                value.min(LOG_NORMAL_CUT * mean).round().max(1.0) as usize
            };
            (0..count).map(|_| (draw(input), draw(output))).collect()
        }
        Lengths::File { file } => read(file)?.into_iter().cycle().take(count).collect(),
    };
    Ok(pairs)
}

/// Least and most tokens within ±ratio of the mean: outward to whole tokens, at least 1.
fn bounds(mean: usize, ratio: f64) -> (u64, u64) {
    let low = (mean as f64 * (1.0 - ratio)).floor().max(1.0) as u64;
    let high = (mean as f64 * (1.0 + ratio)).ceil() as u64;
    (low, high)
}

fn read(file: &Path) -> Result<Vec<LengthPair>> {
    #[derive(Deserialize)]
    struct Row {
        input_tokens: usize,
        output_tokens: usize,
    }
    let hint =
        "it must be CSV with the columns input_tokens and output_tokens, both whole numbers of 1 or more";
    let open = std::fs::File::open(file).map_err(|error| Error::read(file, &error))?;
    let mut pairs = Vec::new();
    for row in csv::Reader::from_reader(open).deserialize() {
        let row: Row =
            row.map_err(|error| Error::invalid(format!("length file {}: {error}", file.display()), hint))?;
        if row.input_tokens == 0 || row.output_tokens == 0 {
            let fact = format!("length file {}: row {} has a length of 0", file.display(), pairs.len() + 1);
            return Err(Error::invalid(fact, hint));
        }
        pairs.push((row.input_tokens, row.output_tokens));
    }
    if pairs.is_empty() {
        return Err(Error::invalid(format!("length file {} has no rows", file.display()), hint));
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(pairs: &[LengthPair]) -> LengthPair {
        pairs.iter().fold((0, 0), |sum, pair| (sum.0 + pair.0, sum.1 + pair.1))
    }

    #[test]
    fn numpy_lengths_are_those_of_the_series() {
        let pairs = draw(&Lengths::NumpyUniform { ratio: 0.9 }, 512, 512, 200, 0).unwrap();
        assert_eq!(sums(&pairs), (108_378, 105_567));
        assert_eq!(pairs[..2], [(836, 262), (638, 494)]);
    }

    #[test]
    fn uniform_lengths_fill_their_range_evenly() {
        let pairs = draw(&Lengths::Uniform { ratio: 0.5 }, 100, 10, 4000, 1).unwrap();
        let inputs = || pairs.iter().map(|pair| pair.0);
        assert_eq!((inputs().min(), inputs().max()), (Some(50), Some(150)));
        let mean = sums(&pairs).0 as f64 / 4000.0;
        assert!((mean - 100.0).abs() < 2.0, "{mean}");
        assert!(pairs.iter().all(|pair| (5..=15).contains(&pair.1)));
    }

    #[test]
    fn log_normal_lengths_have_the_mean_asked_for() {
        let pairs = draw(&Lengths::LogNormal { sigma: 0.5 }, 400, 100, 20_000, 0).unwrap();
        let mean = sums(&pairs).0 as f64 / 20_000.0;
        assert!((mean / 400.0 - 1.0).abs() < 0.02, "{mean}");
        assert!(pairs.iter().all(|pair| (1..=1600).contains(&pair.0)));
    }

    #[test]
    fn a_file_of_lengths_is_used_in_order_and_over_again() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("lengths.csv");
        std::fs::write(&file, "input_tokens,output_tokens\n10,2\n20,3\n").unwrap();
        let lengths = Lengths::File { file: file.clone() };
        assert_eq!(draw(&lengths, 1, 1, 3, 0).unwrap(), [(10, 2), (20, 3), (10, 2)]);
        std::fs::write(&file, "input_tokens,output_tokens\n10,many\n").unwrap();
        let error = draw(&lengths, 1, 1, 3, 0).unwrap_err();
        assert!(error.to_string().contains("lengths.csv") && error.exit_code() == 2);
        std::fs::write(&file, "input_tokens,output_tokens\n").unwrap();
        assert!(draw(&lengths, 1, 1, 3, 0).is_err());
    }
}

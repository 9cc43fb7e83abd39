//! `cofolio images --sharing`: all images against each other.

use cofolio_image::sharing::Sharing;
use cofolio_store::{Digest, Domain};
use serde_json::json;

use crate::cmd::Outcome;
use crate::context::{Context, short};
use crate::ui::{Cell, Table, Tone, human_count, percent};

/// Most images that a matrix has columns for; with more of them each row names the closest ones instead.
const COLUMNS_MAX: usize = 16;

/// How many of the closest images a row names.
const CLOSEST: usize = 3;

pub(super) fn run(domain: &Domain, full_digests: bool, context: &Context<'_>) -> Outcome {
    let (refs, exit) = context.refs(domain)?;
    let names = |image: &Digest| -> Vec<&str> {
        let of_image = refs.iter().filter(|(_, record)| record.image == *image);
        of_image.map(|(name, _)| name.as_str()).collect()
    };
    let mut images: Vec<(Vec<&str>, Digest)> =
        domain.images()?.into_iter().map(|image| (names(&image), image)).collect();
    // By name, so that versions of one thing stand together; what has no name comes last.
    images.sort_by_key(|(names, image)| (names.is_empty(), names.first().copied(), *image));
    let digests: Vec<Digest> = images.iter().map(|(_, image)| *image).collect();
    let sharing = Sharing::of(domain, &digests)?;

    if context.ui.json {
        let mut value = json!(sharing);
        for ((names, _), row) in
            images.iter().zip(value["images"].as_array_mut().into_iter().flatten())
        {
            row["names"] = json!(names);
        }
        context.ui.json(&value)?;
        return Ok(exit);
    }
    if images.is_empty() {
        context.ui.note("no images (`cofolio import SOURCE` brings one in)");
        return Ok(exit);
    }
    let wide = images.len() <= COLUMNS_MAX;
    context.ui.table(&table(&images, &sharing, wide, full_digests))?;
    context.ui.note(match wide {
        true => "a row's percents: how much of that image's content each image has, by its number",
        false => "percents: how much of that image's content the image of that number has",
    });
    Ok(exit)
}

/// `wide`: with a column for each image.
fn table(
    images: &[(Vec<&str>, Digest)],
    sharing: &Sharing,
    wide: bool,
    full_digests: bool,
) -> Table {
    let numbers: Vec<String> = (1..=images.len()).map(|number| number.to_string()).collect();
    let mut headers = vec!["", "NAME", "IMAGE", "OBJECTS", "CONTENT", "ALONE"];
    match wide {
        true => headers.extend(numbers.iter().map(String::as_str)),
        false => headers.push("SHARES MOST WITH"),
    }
    let mut table = Table::new(&headers);
    for (number, ((names, image), of)) in images.iter().zip(&sharing.images).enumerate() {
        let name = match names[..] {
            [] => Cell::left("<none>").tone(Tone::Dim),
            [one] => Cell::left(one).tone(Tone::Bold),
            [first, ..] => Cell::left(format!("{first} (+{})", names.len() - 1)).tone(Tone::Bold),
        };
        let part = |bytes| format!("{:.0} %", percent(bytes, of.bytes));
        let mut row = vec![
            Cell::right(numbers[number].as_str()),
            name,
            Cell::left(if full_digests { image.to_string() } else { short(image) }),
            Cell::right(human_count(of.objects)),
            Cell::size(of.bytes),
            Cell::right(part(of.exclusive_bytes)),
        ];
        let shared = &sharing.bytes[number];
        if wide {
            row.extend(shared.iter().enumerate().map(|(other, &bytes)| match bytes {
                _ if other == number => Cell::right("-").tone(Tone::Dim),
                0 => Cell::right("0 %").tone(Tone::Dim),
                bytes => Cell::right(part(bytes)),
            }));
        } else {
            let closest = closest(number, shared).into_iter();
            let closest =
                closest.map(|other| format!("{} of {}", part(shared[other]), numbers[other]));
            row.push(Cell::left(closest.collect::<Vec<_>>().join(", ")));
        }
        table.row(row);
    }
    table
}

/// The images that share most with image `number`, of which `shared` is the row.
fn closest(number: usize, shared: &[u64]) -> Vec<usize> {
    let mut others: Vec<usize> =
        (0..shared.len()).filter(|&other| other != number && shared[other] > 0).collect();
    others.sort_by_key(|&other| (std::cmp::Reverse(shared[other]), other));
    others.truncate(CLOSEST);
    others
}

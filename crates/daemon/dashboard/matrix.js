// Which images share with which: a table, shaded.

import { imageName } from "./accounts.js";
import { bytesNode, countNode, el, foreign, harmless, setBytes } from "./ui.js";

const MOST = 20;
const SHADES = [1, 2, 3, 4, 5];

/** The table, or null without images, and a note. `total` is the number of images in the domain. */
export function matrix({ domain, images, bytes }, total) {
  const order = images.map((_, at) => at).sort((a, b) => bytes[b][b] - bytes[a][a]).slice(0, MOST);
  if (order.length === 0) return { table: null, note: ["No image is named or mounted."] };
  const pairs = order.flatMap((a) => order.filter((b) => b !== a).map((b) => bytes[a][b]));
  const largest = Math.max(0, ...pairs);
  const name = (image) => imageName({ ...image, domain });
  const names = images.map((image) => harmless(name(image)));

  const cell = (a, b) => {
    const shade = bytes[a][b] > 0 ? Math.ceil(bytes[a][b] / largest * SHADES.length) : 0;
    return setBytes(el("td", {
      class: a === b ? "own" : `heat-${shade}`,
      title: a === b ? `${names[a]}, resident` : `${names[a]} and ${names[b]}`,
      "data-column": images[b].image,
    }), bytes[a][b]);
  };
  // Columns are headed by the numbers of the rows. Screen readers get the names.
  const rank = (at) => el("span", { class: "rank", "data-count": at + 1 }, String(at + 1));
  const heads = order.map((b, at) => el("th", { scope: "col", title: names[b] }, rank(at),
    el("span", { class: "hidden-text", "data-foreign": "" }, ` ${names[b]}`)));
  const rows = order.map((a, at) => el("tr", { "data-key": `${domain}/${images[a].image}` },
    el("th", { scope: "row" }, rank(at), foreign(name(images[a]))),
    ...order.map((b) => cell(a, b))));
  const table = el("table", { "aria-labelledby": "matrix-title" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Image"), ...heads)),
    el("tbody", {}, ...rows));

  const note = [];
  if (total > order.length) {
    note.push("The ", countNode(order.length), " images with most resident, of ");
    note.push(countNode(total), ". ");
  }
  note.push("Each cell: resident bytes that both images have. Diagonal: all that is ",
    "resident of the image. Shade: ", bytesNode(0), " ",
    ...SHADES.map((shade) => el("i", { class: `swatch heat-${shade}` })), " ",
    bytesNode(largest), ".");
  return { table, note };
}

// The tables: what each shows of an account, and what the figures are called.

import { Table } from "./table.js";
import { ageNode, el, foreign, harmless, link, short } from "./ui.js";

const $ = (id) => document.getElementById(id);

/** Images of the last report, by key. Containers and users only have digests. */
let images = new Map();
export const imageKey = (image) => `${image.domain}/${image.image}`;
export function setImages(list) {
  images = new Map(list.map((image) => [imageKey(image), image]));
}

/** `domain/digest`, as in the fragment. Neither has a slash: a domain's name is `[a-z0-9._-]`. */
export function splitKey(key) {
  const cut = key.lastIndexOf("/");
  return [key.slice(0, cut), key.slice(cut + 1)];
}

const DEFAULT_DOMAIN = "default";
/** In other trust domains with the domain: an image of each can have the same name and digest. */
const inDomain = (name, domain) => (domain === DEFAULT_DOMAIN ? name : `${name} (${domain})`);
const firstName = (image) => inDomain(image.names[0] || short(image.image), image.domain);
/** One name of it, and how many more there are. */
export function imageName(image) {
  const others = image.names.length - 1;
  return firstName(image) + (others > 0 ? ` +${others}` : "");
}
export function imageLabel(key) {
  const image = images.get(key);
  const [domain, digest] = splitKey(key);
  return image ? imageName(image) : inDomain(short(digest), domain);
}

/** Another image or file starts on its first page, unfiltered. */
const freshUsers = { "users.q": null, "users.page": null };
const freshFiles = { ...freshUsers, object: null, path: null, "files.q": null, "files.page": null };
export const imageLink = (key, label = imageLabel(key)) =>
  link({ image: key, ...freshFiles }, foreign(label));
const fileLink = ({ object, path }) => link({ object, path, ...freshUsers }, foreign(path));

const oneLine = (...nodes) => el("div", { class: "first" }, ...nodes);
const twoLines = (name, rest) => [oneLine(name), el("div", { class: "second" }, rest)];

function imageCell(image) {
  const aside = { class: "aside" };
  const others = image.names.slice(1).flatMap((name) => [" ", foreign(name, aside)]);
  const digest = image.names[0]
    ? foreign(short(image.image), { ...aside, title: image.image })
    : el("span", aside, "no name");
  const first = imageLink(imageKey(image), firstName(image));
  return [oneLine(first, ...others, " ", digest)];
}

/** Without a name, the end of the cgroup's path stands for one: it has the container's id. */
function containerCell({ cgroup, name }) {
  if (name) return twoLines(foreign(name), foreign(cgroup));
  const cut = cgroup.lastIndexOf("/", cgroup.length - 2) + 1;
  const end = foreign(cgroup.slice(cut), { title: harmless(cgroup) });
  return twoLines(end, foreign(cgroup.slice(0, cut)));
}

const imagesCell = (container) =>
  [oneLine(...container.images.flatMap((it, at) => [at ? ", " : "", imageLink(imageKey(it))]))];

const imageWords = (image) => [...image.names, image.image].join("\n");
const labels = (list) => list.map((image) => imageLabel(imageKey(image))).join("\n");
const containerWords = ({ name, cgroup }, list) => [name ?? "", cgroup, labels(list)].join("\n");
const containerColumn = { id: "name", label: "Container", cell: containerCell,
  sort: (it) => it.name || it.cgroup };

const bytes = (id, label, help) => ({ id, label, help, kind: "bytes" });
const count = (id, label, help) => ({ id, label, help, kind: "count" });
/** What is private and what is shared, as a bar and as figures. */
const parts = (alone, others) => [
  { id: "bar", label: "Private and shared", kind: "bar" },
  bytes("private_bytes", "Private", alone),
  bytes("shared_bytes", "Shared", others),
];

export const containersTable = new Table($("containers-table"), {
  id: "containers", title: "containers-title", noun: "container",
  key: (it) => it.cgroup,
  words: (it) => containerWords(it, it.images),
  sort: "-private_bytes", length: "used_bytes",
  empty: "No container has used a file of an image.",
  columns: [
    containerColumn,
    ...parts("Used by no other container", "Used by other containers too"),
    bytes("commons_bytes", "Commons", "Charged to the commons cgroup"),
    bytes("used_bytes", "Used", "Private and shared"),
    bytes("proportional_bytes", "Proportional", "Each file divided by the number of its users"),
    bytes("saved_bytes", "Saved", "This container's part of what is saved"),
    count("objects", "Files", "Distinct files that it used"),
    { id: "images", label: "Images", cell: imagesCell, sort: (it) => labels(it.images) },
  ],
});

export const imagesTable = new Table($("images-table"), {
  id: "images", title: "images-title", noun: "image",
  key: imageKey, words: imageWords, sort: "-resident_bytes", length: "resident_bytes",
  empty: "No image is named or mounted.",
  columns: [
    { id: "name", label: "Image", cell: imageCell, sort: (it) => it.names[0] || it.image },
    ...parts("Resident, and in no other image", "Resident, and in another image too"),
    bytes("resident_bytes", "Resident", "In the page cache, in whole pages"),
    bytes("used_bytes", "Used", "Used through this image"),
    bytes("saved_bytes", "Saved", "This image's part of what is saved"),
    bytes("metadata_bytes", "Metadata", "Resident pages of the metadata image"),
    bytes("bytes", "Size", "All files, resident or not"),
    count("objects", "Files", "Distinct files"),
    count("containers", "Containers", "Containers that used it"),
  ],
});

/** The image, and why no free memory is taken from the machine, if so. */
const machineCell = ({ name, image_name, recycling }) =>
  twoLines(foreign(name), foreign([image_name, recycling.refusal].filter(Boolean).join(": ")));

export const machinesTable = new Table($("machines-table"), {
  id: "machines", title: "machines-title", noun: "machine",
  key: (it) => it.name,
  words: (it) => [it.name, it.image_name, it.recycling.refusal ?? ""].join("\n"),
  sort: "-proportional_bytes", empty: "No virtual machine of this trust domain runs.",
  columns: [
    { id: "name", label: "Machine", cell: machineCell, sort: (it) => it.name },
    bytes("memory_bytes", "Memory", "What the guest has"),
    bytes("used_bytes", "Used", "Private pages that the guest's kernel and programs use"),
    bytes("cache_bytes", "Cache", "Private pages of files in the guest's cache"),
    bytes("unreturned_bytes", "Free", "Private pages that the guest has free and the host holds"),
    bytes("emulator_bytes", "Emulator", "Private pages of the VMM itself"),
    bytes("merged_bytes", "Merged", "Pages that pools have once for several guests"),
    bytes("image_bytes", "Image", "Pages of its image that it has touched"),
    bytes("proportional_bytes", "Proportional", "Private pages, and its part of shared ones"),
    bytes("zero_bytes", "Zeros", "Pages of zeros, which take nothing"),
  ],
});

export const domainsTable = new Table($("domains-table"), {
  id: "domains", title: "domains-title", noun: "domain",
  key: (it) => it.domain, words: (it) => it.domain, sort: "-saved_bytes",
  empty: "No trust domain exists.",
  columns: [
    { id: "name", label: "Domain", sort: (it) => it.domain,
      cell: (it) => [link({ domain: it.domain }, foreign(it.domain))] },
    bytes("saved_bytes", "Saved"),
    bytes("resident_bytes", "Resident"),
    bytes("used_bytes", "Used"),
    bytes("shared_bytes", "Shared", "Used by more than one container"),
    bytes("metadata_bytes", "Metadata"),
    bytes("bytes", "Size"),
    count("objects", "Files"),
  ],
});

export const filesTable = new Table($("files-table"), {
  id: "files", title: "drawer-title", noun: "file",
  key: (it) => it.path, words: (it) => it.path, sort: "-resident_bytes", remote: true,
  empty: "No file of the image has an object.",
  columns: [
    { id: "path", label: "Path", sort: (it) => it.path, cell: (it) => [oneLine(fileLink(it))] },
    bytes("resident_bytes", "Resident"),
    bytes("bytes", "Size"),
    { ...count("users", "Users", "Containers that use the file, through any image"), sort: false },
  ],
});

export const usersTable = new Table($("users-table"), {
  id: "users", title: "drawer-title", noun: "user",
  key: (it) => `${it.cgroup} ${it.image}`,
  words: (it) => containerWords(it, [it]),
  sort: "seconds_ago", empty: "No container uses this file now.",
  columns: [
    containerColumn,
    { id: "image", label: "Through image", sort: (it) => labels([it]),
      cell: (it) => imagesCell({ images: [it] }) },
    { id: "seconds_ago", label: "Last seen", kind: "age",
      cell: (it) => [ageNode(it.seconds_ago), " ago"] },
  ],
});

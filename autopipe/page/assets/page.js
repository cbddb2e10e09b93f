// The sliders, which evaluate sheets (formulas.js), and the picture of a step, which zooms.

// --- texts, as autopipe.util.numbers has them

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Three digits: `24.5`, `0.504`, `1,234`. */
function digits(number) {
  return number >= 999.5 ? grouped.format(number) : String(Number(number.toPrecision(3)));
}

function secondsText(time) {
  if (time === 0) return "0 s";
  const [unit, size] = time >= 0.9995 ? ["s", 1] : time >= 0.9995e-3 ? ["ms", 1e-3] : ["us", 1e-6];
  return `${digits(time / size)}\u00a0${unit}`;
}

function bytesText(size) {
  const units = [["TiB", 40], ["GiB", 30], ["MiB", 20], ["KiB", 10]];
  const [unit, power] = units.find(([, power]) => size >= 2 ** power) ?? ["bytes", 0];
  return `${power ? (size / 2 ** power).toFixed(1) : size}\u00a0${unit}`;
}

function shareText(ratio) {
  const share = Math.max(ratio, 0);
  return `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}\u00a0%`;
}

const countText = (number, one, many) => `${grouped.format(number)} ${number === 1 ? one : many}`;

/** A new element; its text is no markup. */
function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

// --- the sliders

const LETTERS = "ABCDEFGH";
const NOT_MOVED = -1; // the stop of a micro-batch's rows at which each plan has its own, or fewer

/** What a slider stands for: its stops, the one that was planned, and their texts. */
function slidersOf(data) {
  const { stops, planned } = data;
  return {
    batch: { stops: stops.batches, planned: planned.batch, text: (n) => countText(n, "row", "rows") },
    rows: {
      stops: [NOT_MOVED, ...stops.rows],
      planned: NOT_MOVED,
      text: (n) => (n === NOT_MOVED ? "as planned" : countText(n, "row", "rows")),
    },
    tokens: { stops: stops.tokens, planned: planned.tokens, text: (n) => grouped.format(n) },
    link: {
      stops: stops.bandwidths,
      planned: planned.bandwidth,
      text: (n) => (n >= 0.9995e9 ? `${digits(n / 1e9)}\u00a0GB/s` : `${digits(n / 1e6)}\u00a0MB/s`),
    },
    memory: { stops: stops.memory, planned: planned.room, text: bytesText },
  };
}

/** The stop nearest to what was planned: it is that one, but for rounding. */
function nearest(stops, planned) {
  let best = 0;
  stops.forEach((stop, number) => {
    if (Math.abs(stop - planned) < Math.abs(stops[best] - planned)) best = number;
  });
  return best;
}

/** A plan's own rows of a micro-batch, or the most below them into which the batch divides. */
function ownRows(data, sheet, batch) {
  const divides = (rows) => sheet.counts[batch / (sheet.dp * rows)] !== undefined;
  if (divides(sheet.rows)) return sheet.rows;
  const less = data.stops.rows.filter((rows) => rows < sheet.rows && divides(rows));
  return less.length ? Math.max(...less) : sheet.rows;
}

/** What every plan takes at these sizes, and the number of the fastest that fits, or -1. */
function compare(data, sizes) {
  const share = sizes.memory / data.planned.room;
  const found = data.sheets.map((sheet) => {
    const rows = sizes.rows === NOT_MOVED ? ownRows(data, sheet, sizes.batch) : sizes.rows;
    const took = outcome(sheet, {
      batch: sizes.batch,
      rows,
      tokens: sizes.tokens,
      bandwidth: sizes.link,
    });
    if (took === null) return { rows, took: null, fits: false };
    const rooms = sheet.ranks.map((rank) => rank.room * share);
    const fullest = took.peaks.reduce(
      (most, peak, rank) => (peak / rooms[rank] > took.peaks[most] / rooms[most] ? rank : most),
      0,
    );
    const [held, room] = [took.peaks[fullest], Math.round(rooms[fullest])];
    return { rows, took, held, room, fits: held <= room };
  });
  let wins = -1;
  found.forEach(({ took, fits }, number) => {
    if (fits && (wins < 0 || took.seconds < found[wins].took.seconds)) wins = number;
  });
  return { found, wins };
}

/** Of the longest path what computes, what is on links, and what sums gradients. */
function pathText(sheet, took, sizes, rows) {
  const at = { b: rows, s: sizes.tokens, w: sizes.link };
  const costs = sheet.costs.map((cost) => value(cost, at));
  const stages = sheet.ranks.reduce((total, rank) => total + Object.keys(rank.stages).length, 0);
  const parts = { computing: 0, "sums of gradients": 0, links: 0 };
  const paths = sheet.counts[took.microBatches].paths;
  const longest = paths.reduce((best, path) => (sum(path, costs) > sum(best, costs) ? path : best));
  for (const [number, times] of longest) {
    const part =
      number < 2 * stages ? "computing" : number < 3 * stages ? "sums of gradients" : "links";
    parts[part] += costs[number] * times;
  }
  const told = Object.entries(parts).filter(([, seconds]) => seconds >= 0.0005 * took.seconds);
  return told.map(([part, seconds]) => `${part} ${shareText(seconds / took.seconds)}`).join(", ");
}

const meshText = (sheet) => `pp ${sheet.pp} × dp ${sheet.dp} × tp ${sheet.tp}`;

function wordsOf(sheet, took, rows) {
  const words = [sheet.schedule];
  if (sheet.zero) words.push(`ZeRO-${sheet.zero}`);
  if (sheet.again) words.push(`${countText(sheet.again, "block", "blocks")} run again`);
  const each = countText(rows, "row", "rows");
  words.push(
    took === null
      ? `micro-batches of ${each}`
      : `${countText(took.microBatches, "micro-batch", "micro-batches")} of ${each}`,
  );
  return words.join(", ");
}

/** Smaller micro-batches with which a plan that does not fit or divide does. */
function smaller(data, sizes, number, rows) {
  const less = data.stops.rows.filter((stop) => stop < rows).reverse();
  for (const stop of less) {
    const { found } = compare({ ...data, sheets: [data.sheets[number]] }, { ...sizes, rows: stop });
    if (found[0].fits) {
      const each = countText(stop, "row", "rows");
      return `with micro-batches of ${each} it does: ${secondsText(found[0].took.seconds)}`;
    }
  }
  return "";
}

function verdict(data, sizes, { found, wins }, number) {
  const { rows, took, held, room, fits } = found[number];
  if (took === null) {
    const words = smaller(data, sizes, number, rows);
    return `the batch does not divide so${words && `; ${words}`}`;
  }
  if (!fits) {
    const words = smaller(data, sizes, number, rows);
    return `does not fit: ${bytesText(held - room)} too many${words && `; ${words}`}`;
  }
  if (number === wins) return "the fastest that fits";
  return `${shareText(took.seconds / found[wins].took.seconds - 1)} slower than ${LETTERS[wins]}`;
}

function card(data, sizes, compared, number) {
  const sheet = data.sheets[number];
  const { rows, took, held, room, fits } = compared.found[number];
  const made = element("li", `plan${number === compared.wins ? " wins" : ""}`);
  made.style.setProperty("--hue", `var(--p${number})`);
  made.dataset.plan = LETTERS[number];
  const head = element("h3");
  head.append(element("span", "", LETTERS[number]), `${meshText(sheet)}${number ? "" : " (this plan)"}`);
  made.append(head, element("p", "muted", wordsOf(sheet, took, rows)));
  if (took !== null) {
    made.dataset.seconds = took.seconds;
    made.dataset.bytes = held;
    made.append(element("p", `seconds${fits ? "" : " out"}`, secondsText(took.seconds)));
  }
  made.append(element("p", `verdict${fits ? "" : " out"}`, verdict(data, sizes, compared, number)));
  if (took === null) return made;
  const pace = sizes.batch / took.seconds / sheet.devices;
  const rate = sheet.tokens ? `${digits(pace * sizes.tokens)} tokens/s` : `${digits(pace)} rows/s`;
  const reached = took.mfu === null ? "" : `, MFU ${shareText(took.mfu)}`;
  made.append(element("p", "", `${rate} a device${reached}, bubble ${shareText(took.bubble)}`));
  made.append(element("p", "", `${bytesText(held)} of ${bytesText(room)} on the fullest device`));
  const meter = element("div", "meter");
  const scale = 100 / Math.max(held, room * 1.15);
  const [filled, limit] = [element("i"), element("b")];
  filled.style.width = `${held * scale}%`;
  limit.style.left = `${room * scale}%`;
  meter.append(filled, limit);
  meter.setAttribute("aria-hidden", "true");
  made.append(meter);
  made.append(element("p", "muted", `longest path: ${pathText(sheet, took, sizes, rows)}`));
  const why = element("details");
  why.append(element("summary", "", "what binds it, as planned"), element("p", "", sheet.binding));
  made.append(why);
  return made;
}

function winnerText(data, { found, wins }) {
  if (wins < 0) return "None of these plans fits, or divides this batch: plan anew for these sizes.";
  const own = found[0];
  const best = found[wins].took;
  const name = `${LETTERS[wins]} (${meshText(data.sheets[wins])})`;
  if (wins === 0) return `This plan, A, is the fastest of these that fits: ${secondsText(best.seconds)} a step.`;
  const beside = own.took === null
    ? "this plan does not divide the batch so"
    : own.fits
      ? `this plan takes ${secondsText(own.took.seconds)}, ${shareText(own.took.seconds / best.seconds - 1)} more`
      : "this plan does not fit";
  return `Here ${name} wins with ${secondsText(best.seconds)} a step; ${beside}.`;
}

/** Which plan wins at each of a slider's stops, the others as they are: runs of letters. */
function strip(place, data, sliders, sizes, name) {
  const { stops, text } = sliders[name];
  const winners = stops.map((stop) => compare(data, { ...sizes, [name]: stop }).wins);
  const last = Math.max(stops.length - 1, 1);
  const told = [];
  place.replaceChildren();
  for (let first = 0; first < stops.length; ) {
    let end = first;
    while (end < stops.length && winners[end] === winners[first]) end += 1;
    const [left, right] = [Math.max(first - 0.5, 0), Math.min(end - 0.5, last)];
    const letter = winners[first] < 0 ? "none" : LETTERS[winners[first]];
    const cell = element("i", winners[first] < 0 ? "none" : "", letter === "none" ? "–" : letter);
    cell.style.left = `${(100 * left) / last}%`;
    cell.style.width = `${(100 * (right - left)) / last}%`;
    if (winners[first] >= 0) cell.style.background = `var(--p${winners[first]})`;
    place.append(cell);
    const [from, until] = [text(stops[first]), text(stops[end - 1])];
    told.push(`${letter} ${from === until ? `at ${from}` : `from ${from} to ${until}`}`);
    first = end;
  }
  place.setAttribute("aria-label", `the fastest that fits: ${told.join("; ")}`);
}

function startSliders(data) {
  const sliders = slidersOf(data);
  const inputs = {};
  for (const place of document.querySelectorAll(".slider")) {
    const { name } = place.dataset;
    const { stops, planned } = sliders[name];
    const input = place.querySelector("input");
    input.max = stops.length - 1;
    input.value = nearest(stops, planned);
    input.defaultValue = input.value;
    place.hidden = stops.length < 2;
    inputs[name] = { input, output: place.querySelector("output"), strip: place.querySelector(".strip") };
  }
  const show = () => {
    const sizes = {};
    for (const [name, { input, output }] of Object.entries(inputs)) {
      const { stops, text } = sliders[name];
      sizes[name] = stops[Number(input.value)];
      output.textContent = text(sizes[name]);
      input.setAttribute("aria-valuetext", output.textContent);
    }
    const compared = compare(data, sizes);
    document.getElementById("winner").textContent = winnerText(data, compared);
    const open = [...document.querySelectorAll(".plan details")].map((each) => each.open);
    document
      .getElementById("plans")
      .replaceChildren(...data.sheets.map((_, number) => card(data, sizes, compared, number)));
    document.querySelectorAll(".plan details").forEach((each, number) => {
      each.open = open[number] ?? false;
    });
    for (const [name, { strip: place }] of Object.entries(inputs)) {
      if (sliders[name].stops.length > 1) strip(place, data, sliders, sizes, name);
    }
  };
  const form = document.getElementById("sliders");
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(show));
  show();
}

// --- the picture of a step

function startPicture(picture) {
  const wide = picture.querySelector(".wide");
  const ticks = picture.querySelector(".ticks");
  const seconds = Number(picture.dataset.seconds);
  let zoom = 1;

  const mark = () => {
    const most = Math.max(4, Math.floor(ticks.clientWidth / 90));
    const power = 10 ** Math.floor(Math.log10(seconds / most));
    const step = [1, 2, 5, 10].map((times) => times * power).find((each) => seconds / each <= most);
    ticks.replaceChildren();
    for (let number = 0; number * step <= seconds * (1 + 1e-9); number += 1) {
      const made = element("span", "", secondsText(number * step));
      made.style.left = `${(100 * number * step) / seconds}%`;
      ticks.append(made);
    }
  };
  /** Zooms, with what is `at` pixels from the left of the picture where it is. */
  const zoomTo = (wanted, at = picture.clientWidth / 2) => {
    const share = (picture.scrollLeft + at) / wide.offsetWidth;
    zoom = Math.min(64, Math.max(1, wanted));
    wide.style.setProperty("--zoom", zoom);
    picture.scrollLeft = share * wide.offsetWidth - at;
    mark();
  };
  const ways = { in: () => zoomTo(zoom * 1.6), out: () => zoomTo(zoom / 1.6), fit: () => zoomTo(1) };
  document.querySelectorAll("[data-zoom]").forEach((button) => {
    button.addEventListener("click", ways[button.dataset.zoom]);
  });
  picture.addEventListener("keydown", (event) => {
    const way = { "+": "in", "=": "in", "-": "out", 0: "fit" }[event.key];
    if (way && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      ways[way]();
    }
  });
  picture.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoomTo(zoom * 1.002 ** -event.deltaY, event.clientX - picture.getBoundingClientRect().left);
    },
    { passive: false },
  );
  const read = (event) => {
    const box = event.target.closest("i[title]");
    if (!box) return;
    const rank = box.closest(".lane").querySelector(".rank").firstChild.textContent;
    document.getElementById("readout").textContent = `${rank}: ${box.title}`;
  };
  picture.addEventListener("pointerover", read);
  picture.addEventListener("click", read);
  window.addEventListener("resize", mark);
  if (seconds > 0) mark();
}

const data = JSON.parse(document.getElementById("data").textContent);
if (data !== null) startSliders(data);
startPicture(document.getElementById("picture"));

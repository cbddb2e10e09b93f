// Evaluates sheets as `autopipe.scaling.evaluate` does: the same formulas, the same numbers.
"use strict";

const OPERATORS = {
  "+": (numbers) => numbers.reduce((sum, each) => sum + each, 0),
  "*": (numbers) => numbers.reduce((product, each) => product * each, 1),
  "^": ([base, power]) => base ** power,
  max: (numbers) => Math.max(...numbers),
  min: (numbers) => Math.min(...numbers),
  floor: ([number]) => Math.floor(number),
};

/** The number that an expression has where its variables b, s, w have these values. */
function value(expression, at) {
  if (typeof expression === "string") return at[expression];
  if (!Array.isArray(expression)) return expression;
  const [operator, ...operands] = expression;
  return OPERATORS[operator](operands.map((operand) => value(operand, at)));
}

/** The value of a sum of costs or sizes, each so many times. */
function sum(form, values) {
  return form.reduce((total, [number, times]) => total + values[number] * times, 0);
}

/** Bytes of a rank at the moment at which it holds most. */
function peakOf(rank, moments, sizes, at, again) {
  let there = null;
  let most = -1;
  for (const moment of moments) {
    const held = {};
    let total = 0;
    for (const [stage, form] of Object.entries(moment)) {
      held[stage] = sum(form, sizes);
      total += held[stage];
    }
    if (total > most) [there, most] = [held, total];
  }
  let bytes = 0;
  for (const [stage, own] of Object.entries(rank.stages)) {
    const beside = (again ? own.added : 0) + value(own.passing, at);
    bytes += own.held + Math.max(there[stage] + beside, own.bucket);
  }
  return Math.round(bytes);
}

/**
 * What a plan takes: {seconds, bubble, peaks, microBatches, parts}; null where the batch does not
 * divide so, or into a number of micro-batches that the sheet does not tell of.
 */
function outcome(sheet, { batch, rows, tokens, bandwidth }) {
  const microBatches = batch / (sheet.dp * rows);
  const count = sheet.counts[microBatches];
  if (!Number.isInteger(microBatches) || !count) return null;
  const at = { b: rows, s: tokens, w: bandwidth };
  const costs = sheet.costs.map((cost) => value(cost, at));
  const seconds = Math.max(...count.paths.map((path) => sum(path, costs)));
  const busy = microBatches * sum(sheet.computing, costs);
  const sizes = sheet.sizes.map((size) => value(size, at));
  const peaks = sheet.ranks.map((rank, number) =>
    peakOf(rank, count.moments[number], sizes, at, microBatches > 1),
  );
  const flops = value(sheet.flops, { b: batch, s: tokens, w: bandwidth });
  return {
    seconds,
    busy,
    bubble: seconds ? 1 - busy / seconds : 0,
    peaks,
    microBatches,
    mfu: sheet.peak ? flops / (seconds * sheet.peak) : null,
  };
}

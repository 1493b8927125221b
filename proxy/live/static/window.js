// The status documents of the last ten seconds, and by how much a total grew in them.

const WINDOW_MS = 10500;
const documents = [];

export function remember(status) {
  const now = performance.now();
  documents.push({ at: now, status });
  while (documents.length > 2 && now - documents[0].at > WINDOW_MS) documents.shift();
}

export const forget = () => documents.splice(0);

// `totalOf` gives the total in a document, or null. Null unless it is known at both ends and grew: a process
// that was started anew counts from 0.
export function growth(totalOf) {
  if (documents.length < 2) return null;
  const first = documents[0];
  const last = documents[documents.length - 1];
  const [before, after] = [totalOf(first.status), totalOf(last.status)];
  if (before === null || after === null || after < before) return null;
  return { by: after - before, seconds: (last.at - first.at) / 1000 };
}

export function rankIn(status, instance, globalRank) {
  const node = status.nodes.find((one) => one.instance_id === instance);
  return node?.ranks.find((one) => one.global_rank === globalRank)?.counts ?? null;
}

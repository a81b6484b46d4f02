// Order of search results: pages for contributors come after the pages for users.
const CONTRIBUTORS = ["architecture", "log", "benchmarks"];

var Scorer = {
  score: ([page, , , , score]) => (CONTRIBUTORS.includes(page) ? score - 1000 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

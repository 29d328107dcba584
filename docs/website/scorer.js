/* The order of search results. The numbers are those of Sphinx; `score` then prefers the pages that
   a newcomer wants to logs and to tables that name nearly everything. */
var Scorer = {
  score: ([name, , , , score]) => {
    const first = /^(index|data|deploy|edges|predict|pyg|scores|tuning|glossary|measures|privacy|security|polyphony|extending|tutorials\/\w+)$/;
    const last = /^(changelog|reproduction\/\w+|baselines\/.+|equations\/\w+|results\/.+|security-peers)$/;
    return score + (first.test(name) ? 4 : last.test(name) ? -10 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

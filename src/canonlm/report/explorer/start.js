// A page has the sections that it was made with.
filterBar();
for (const [id, section] of Object.entries({
  overview,
  models: modelTable,
  curves: trainingCurves,
  compute,
  grids,
  settings: settingsOfTwo,
}))
  if (at(id)) section();
showAll();

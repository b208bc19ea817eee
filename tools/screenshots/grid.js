// The measures of Grafana's grid, for the page and for the window that it is shot in.
export const ROW_HEIGHT = 38, GAP = 4, TITLE_HEIGHT = 48;

export const heightOf = board =>
  Math.max(...board.panels.map(({ gridPos }) => gridPos.y + gridPos.h)) * ROW_HEIGHT + TITLE_HEIGHT;

/** The board down to a row of the grid. */
export const within = (board, rows) =>
  ({ ...board, panels: board.panels.filter(({ gridPos, type }) => gridPos.y + gridPos.h + (type === 'row' ? 4 : 0) <= rows) });

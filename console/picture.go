package console

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"html/template"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/chart"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

// picture shows how the tokens of a key come back if nothing is taken.
type picture struct {
	Text string // what it shows
	URL  template.URL
}

// points is how many parts of the line are drawn.
const points = 96

// draw returns a picture, or nil if the key is full or the catalog's views are missing.
func (s *site) draw(ctx context.Context, story *inspect.Story) (*picture, error) {
	if len(story.Rows) == 0 || story.Now.ResetAfter <= 0 {
		return nil, nil
	}
	from, to := story.Now.At, story.Now.FullAt()
	retries := story.Never == nil && story.Answer.RetryAfter > 0
	if retries && story.Answer.RetryAt.After(to) {
		to = story.Answer.RetryAt
	}
	lasts := to.Sub(from) * 17 / 16
	values, err := s.ahead(ctx, story, from, from.Add(lasts))
	if err != nil || len(values) < 2 {
		return nil, err
	}
	line := chart.Line{Name: "tokens, if nothing is taken", Steps: story.Holds.Kind != ratelimit.KindTokenBucket}
	for i, v := range values {
		line.Points = append(line.Points, chart.Point{X: lasts.Seconds() * float64(i) / points, Y: v})
	}
	panel := chart.Panel{
		Label: "tokens", Height: 120, Lines: []chart.Line{line}, Shade: &chart.Shading{Name: "debt"},
		Levels: []chart.Level{{Name: "capacity " + visible.Amount(story.Now.Capacity), Y: story.Now.Capacity}},
	}
	if retries {
		name := visible.Amount(story.Answer.Request.Count) + " would be granted"
		panel.Bands = []chart.Band{{Name: name, From: story.Answer.RetryAfter.Seconds(), To: lasts.Seconds()}}
	}
	text := fmt.Sprintf("Tokens from now, %s, until all %s are there, in %s", visible.Amount(story.Now.Value), visible.Amount(story.Now.Capacity), inspect.Span(story.Now.ResetAfter))
	c := chart.Chart{Title: text, X: chart.Time(from, lasts, false), Panels: []chart.Panel{panel}}
	return &picture{text, template.URL("data:image/svg+xml;base64," + base64.StdEncoding.EncodeToString([]byte(c.SVG())))}, nil
}

// ahead returns the tokens that a key will have at evenly spaced instants, from the catalog's
// views.
func (s *site) ahead(ctx context.Context, story *inspect.Story, from, to time.Time) ([]float64, error) {
	rows, _ := s.inspector.Pool.Query(ctx, `SELECT a.value FROM generate_series(0, $3::int4) AS i,
	LATERAL (SELECT l.value FROM `+s.inspector.View("rate_limits_at")+`($4::timestamptz + ($5::timestamptz - $4::timestamptz) * i / $3::int4) AS l
		WHERE l.name = $1::text AND l.key = $2::text) AS a
ORDER BY i`, story.Published.Name, story.Now.Request.Key, points, from, to)
	values, err := pgx.CollectRows(rows, pgx.RowTo[float64])
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && (pgErr.Code == "42883" || pgErr.Code == "42501") { // undefined_function, insufficient_privilege
		return nil, nil
	}
	return values, err
}

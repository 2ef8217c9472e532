package console

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/inspect"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

// picture shows how the tokens of a key come back if nothing is taken: a line and its marks, in
// units of the drawing.
type picture struct {
	Line     string  // the points of an SVG polyline
	Zero     float64 // the height of 0 tokens
	Debt     bool    // the line goes below 0
	Retry    float64 // when the call would be granted, if Retries
	Retries  bool
	Top, Low string // labels of the axis
	To       time.Duration
	Text     string // the text alternative
}

// The size of the drawing without margins.
const (
	width  = 560.0
	height = 120.0
	points = 96
)

// draw returns a picture, or nil if the key is full or the catalog's views are missing.
func (s *site) draw(ctx context.Context, story *inspect.Story) (*picture, error) {
	if len(story.Rows) == 0 || story.Now.ResetAfter <= 0 {
		return nil, nil
	}
	from, to := story.Now.At, story.Now.FullAt()
	if story.Never == nil && story.Answer.RetryAt.After(to) {
		to = story.Answer.RetryAt
	}
	to = to.Add(to.Sub(from) / 16)
	values, err := s.ahead(ctx, story, from, to)
	if err != nil || len(values) < 2 {
		return nil, err
	}
	top, low := story.Now.Capacity, 0.0
	for _, v := range values {
		top, low = max(top, v), min(low, v)
	}
	if top == low {
		return nil, nil
	}
	p := &picture{
		Top: visible.Amount(top), Low: visible.Amount(low), Debt: low < 0, To: to.Sub(from),
		Text: fmt.Sprintf("Tokens from now, %s, until all %s are there, in %s", visible.Amount(story.Now.Value), visible.Amount(story.Now.Capacity), inspect.Span(story.Now.ResetAfter)),
	}
	y := func(v float64) float64 { return round(height * (top - v) / (top - low)) }
	x := func(i float64) float64 { return round(width * i / float64(len(values)-1)) }
	var line strings.Builder
	for i, v := range values {
		if i > 0 && story.Holds.Kind != ratelimit.KindTokenBucket { // tokens come in steps
			fmt.Fprintf(&line, "%g,%g ", x(float64(i)), y(values[i-1]))
		}
		fmt.Fprintf(&line, "%g,%g ", x(float64(i)), y(v))
	}
	p.Line, p.Zero = line.String(), y(0)
	if p.Retries = story.Never == nil && story.Answer.RetryAfter > 0; p.Retries {
		p.Retry = x(float64(len(values)-1) * float64(story.Answer.RetryAt.Sub(from)) / float64(to.Sub(from)))
	}
	return p, nil
}

func round(v float64) float64 { return math.Round(v*10) / 10 }

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
